"""The pages say what the program does."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.command import run_here
from support.tiny_models import save_tiny

# Commands read their options from methods when they are imported: before a test adds one.
from sparsekv.cli import bench, build_index, eval, generate, recall_report  # noqa: F401
from sparsekv.formats.registry import Registry
from sparsekv.indexing.indexers.registry import indexers
from sparsekv.runtime.selection.registry import methods

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_command_reference_is_what_help_prints() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "generate_help.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["render"](), "run `make docs`"


def _options() -> list[tuple[str, str, str]]:
    """Every (page, command, option) that a code block of a page uses."""
    used = set()
    for page in PAGES:
        for line in re.findall(r"sparsekv (?:[a-z-]+)[^\n|)`]*", page.read_text(encoding="utf-8")):
            words = shlex.split(line.replace("'", ""), comments=True) if line.count('"') % 2 == 0 else []
            used |= {(page.name, words[1], word.split("=")[0]) for word in words[2:] if word.startswith("--")}
    return sorted(used)


def test_every_option_that_a_page_uses_exists() -> None:
    helps: dict[str, str] = {}
    missing = []
    for page, command, option in _options():
        if command not in helps:
            outcome = run_here(command, "--help")
            assert outcome.code == 0, f"{page}: {command}"
            helps[command] = outcome.stdout
        if not re.search(rf"{option}\b", helps[command]):
            missing.append((page, command, option))
    assert not missing
    assert helps


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def _example(page: str, file: str) -> str:
    """The Python that a page shows for a file, after what it says to import."""
    shown = page.split(f"`{file}`", 1)[1].split("```python\n", 1)[1]
    block, after = shown.split("```", 1)
    imports = re.findall(r"`(from sparsekv[^`]+)`", after.split("```", 1)[0])
    usual = ["from dataclasses import dataclass", "from typing import ClassVar", "import torch"]
    return "\n".join([*usual, *(" ".join(one.split()) for one in imports), "", block])


def test_the_method_of_the_contributors_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    registries: dict[str, Registry[Any]] = {"indexing/methods/norms.py": indexers, "runtime/methods/norms.py": methods}
    for file, registry in registries.items():
        module = ModuleType(file.replace("/", ".").removesuffix(".py"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        # So that it is unknown again afterwards.
        monkeypatch.setattr(registry, "known", registry())
        exec(compile(_example(page, file), file, "exec"), module.__dict__)
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")
    (tmp_path / "doc.txt").write_text("A word. " * 60)
    built = run_here("build-index", "doc.txt", "--model", "model", "--method", "norms", "-q")
    assert built.code == 0, built.stderr
    reported = run_here("recall-report", "--method", "norms", "--method", "window", "--budget", "100%", "--json")
    assert [row["recall"] for row in json.loads(reported.stdout)["rows"]] == [1, 0], reported.stderr
    asked = run_here("generate", "Why?", "--model", "model", "--method", "norms", "--max-new-tokens", "4", "--json")
    assert json.loads(asked.stdout)["method"] == "norms", asked.stderr
