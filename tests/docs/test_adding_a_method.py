"""The method of docs/how-to/add-a-method.md works, as the page writes it."""

import json
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.command import run_here
from support.doc_pages import ROOT, blocks
from support.tiny_models import save_tiny

# Commands read their options from methods when they are imported: before a test adds one.
from sparsekv.cli import bench, build_index, eval, generate, recall_report  # noqa: F401
from sparsekv.formats.registry import Registry
from sparsekv.indexing.indexers.interface import indexers
from sparsekv.runtime.selection.interface import methods

PAGE = ROOT / "docs" / "how-to" / "add-a-method.md"
SHOWN = {info: [block for block in blocks(PAGE) if block.info == info] for info in ("python", "sh", "toml")}
PLUGIN = ROOT / "tests" / "plugin" / "pyproject.toml"


def test_the_method_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registries: dict[str, Registry[Any]] = {"indexing.methods.norms": indexers, "runtime.methods.norms": methods}
    for (name, registry), block in zip(registries.items(), SHOWN["python"], strict=True):
        assert f"`{name.replace('.', '/')}.py`" in block.before
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        # So that it is unknown again afterwards.
        monkeypatch.setattr(registry, "known", registry())
        exec(compile(block.text, str(block), "exec"), module.__dict__)
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")
    (tmp_path / "doc.txt").write_text("A word. " * 60)
    more = (["--model", "model", "-q"], ["--json"], ["--model", "model", "--max-new-tokens", "4", "--json"])
    ran = []
    for command, options in zip(SHOWN["sh"][0].commands, more, strict=True):
        outcome = run_here(*shlex.split(command)[1:], *options)
        assert outcome.code == 0, outcome.stderr
        ran.append(outcome.stdout)
    assert [row["recall"] for row in json.loads(ran[1])["rows"]] == [1, 0]
    assert json.loads(ran[2])["method"] == "norms"


def test_the_entry_points_of_the_page_are_those_of_a_package() -> None:
    (block,) = SHOWN["toml"]
    shown = tomllib.loads(block.text)["project"]["entry-points"]
    assert shown == tomllib.loads(PLUGIN.read_text(encoding="utf-8"))["project"]["entry-points"]
