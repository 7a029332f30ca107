"""Every --json output is what docs/reference/schemas says of it, strictly."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from jsonschema import Draft202012Validator
from support.command import run_here
from support.doc_pages import ROOT, tables

from sparsekv.cli.app import app
from sparsekv.cli.common.commands import COMMANDS
from sparsekv.cli.configuring.project_file import long_name
from sparsekv.cli.configuring.sources import leaf_commands

PAGE = ROOT / "docs" / "reference" / "json.md"
FILES = sorted((ROOT / "docs" / "reference" / "schemas").glob("*.json"))
SMALL = ("--context", "512", "--budget", "10%", "--runs", "2")
LAYER = ("--heads", "2", "--kv-heads", "1", "--head-dim", "16")
DRAWN = ("--temperature", "0.5", "--top-k", "3")
TASK = (
    "--model",
    "model",
    "--method",
    "quest",
    "--budget",
    "10%",
    "--contexts",
    "1",
    "--length",
    "700",
    "--tail",
    "64",
)
CASES = {
    "generate": [
        ("generate", "Why?", "--max-new-tokens", "2"),
        ("generate", "Why?", "--max-new-tokens", "2", "--gauge", "--guard", "0.2", "--method", "multipole"),
        ("generate", "--batch-file", "questions.txt", "--max-new-tokens", "2", "--prefill", "quoka", *DRAWN),
        ("generate", "--batch-file", "questions.txt", "--max-new-tokens", "2", "--sources", "2"),
        ("generate", "Why?", "--max-new-tokens", "2", "--method", "auto"),
    ],
    "trace": [
        ("trace", "Why?", "--max-new-tokens", "2"),
        ("trace", "Why?", "--max-new-tokens", "2", "--truth", "--without", "Line 7 says that 7 times 7 is 49."),
    ],
    "recall-report": [
        ("recall-report", "--method", "multipole", "--guard", "0.2", "--by", "layer,head", "--budget", "5%"),
        ("recall-report", "--method", "quest", "--residual", "--budget", "40", "--within", "0.01", "--together", "1,4"),
        ("recall-report", "--method", "oracle", "--budget", "5%"),
        ("recall-report", "--index", "int8.skv", "--method", "oracle", "--budget", "5%"),
    ],
    "tune": [
        ("tune", "--target-recall", "0.2", "--method", "quest"),
        ("tune", "--target-error", "0.0001", "--method", "quest", "--dry-run"),
        ("tune", "--target-recall", "0.2", "--method", "quest", "--dry-run", "--cheapest", "time"),
    ],
    "inspect": [
        ("inspect",),
        ("inspect", "--verify", "--clusters", "0"),
        ("inspect", "--index", "lists.skv"),
        ("inspect", "--index", "int8.skv"),
    ],
    "bench": [
        ("bench", *SMALL, *LAYER, "--method", "squeezed"),
        ("bench", "--index", "doc.skv", "--budget", "9", "--runs", "2", "--warm"),
    ],
    "bench-model": [("bench-model", "--config", "model", *SMALL, "--method", "quest")],
    "eval": [("eval", "doc.txt", "--questions", "1", "--max-new-tokens", "1", *TASK)],
    "models-list": [("models", "list")],
    "config": [("config",)],
}
"""Calls by the schema of what they print; each key that may be missing is in the output of one of them."""


@pytest.fixture
def named(place: Path) -> Path:
    """A folder with an index of posting lists, one in 8 bits, a batch of questions, defaults, and the model named
    once."""
    few = ("--method", "csattention", "--max-tokens", "300")
    assert run_here("build-index", "doc.txt", "--model", "model", "-q", "-o", "lists.skv", *few).code == 0
    assert run_here("convert", "doc.skv", "-o", "int8.skv", "-q").code == 0
    (place / "questions.txt").write_text("Why?\n\nHow?\n")
    (place / "sparsekv.toml").write_text('index = "doc.skv"\n[generate]\nahead = false\n[eval]\nprefill = ["dense"]\n')
    return place


def schema(name: str) -> Any:
    return json.loads((ROOT / "docs" / "reference" / "schemas" / f"{name}.json").read_text(encoding="utf-8"))


def test_every_output_is_as_its_schema_says(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder, one after another: after `tune` its default is in what `inspect` shows."""
    monkeypatch.setenv("SPARSEKV_DEVICE", "cpu")
    for name, calls in CASES.items():
        validator = Draft202012Validator(schema(name))
        for call in calls:
            outcome = run_here(*call, "--json", *(() if call[0] in ("models", "config") else ("-q",)))
            assert outcome.stdout, f"{call}: {outcome.stderr}"
            for text in outcome.stdout.splitlines() if "--batch-file" in call else [outcome.stdout]:
                wrong = [f"{call}: {one.json_path}: {one.message}" for one in validator.iter_errors(json.loads(text))]
                assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_schema_is_valid_and_strict(path: Path) -> None:
    """No object may have a key that is not described, and every key has a description."""
    found = schema(path.stem)
    Draft202012Validator.check_schema(found)
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for at, part in _parts(found, ""):
        if "properties" in part:
            assert part["additionalProperties"] is False, at
            undescribed = [key for key, one in part["properties"].items() if not {"description", "$ref"} & one.keys()]
            assert not undescribed, at
            assert set(part["required"]) <= part["properties"].keys(), at


def _parts(part: Any, at: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(part, dict):
        yield at, part
        for key, inner in part.items():
            yield from _parts(inner, f"{at}/{key}")
    elif isinstance(part, list):
        for inner in part:
            yield from _parts(inner, at)


def test_every_json_output_has_a_schema_and_a_row_on_the_page() -> None:
    group = typer.main.get_command(app)
    printing = set()
    for name in COMMANDS:
        command = group.get_command(typer.Context(group), name)  # type: ignore[attr-defined]
        for path, leaf in leaf_commands((name,), command):
            options = [long_name(one) for one in leaf.params if one.param_type_name == "option"]
            printing |= {" ".join(path)} if "json" in options else set()
    rows = {row[0].strip("`").removesuffix(" --json"): row[1] for row in tables(PAGE, "command", "schema")}
    assert printing == rows.keys()
    assert sorted(rows.values()) == sorted(f"[{path.name}](schemas/{path.name})" for path in FILES)
    assert CASES.keys() == {path.stem for path in FILES}
