"""A build over an index of a stranger: what contradicts itself, or is no number, is told as the index's fault."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import run_here
from support.sealing import Fields, Tensors, change_tensors, read_fields, reseal

BUILD = ("build-index", "doc.txt", "--model", "model", "--method", "multipole", "-q")


def _longer() -> None:
    text = Path("doc.txt").read_text()
    Path("doc.txt").write_text(f"{text}And a last line, which was not there before.\n")


def _fewer_rows(tensors: Tensors) -> Tensors:
    return {name: rows[:, :100].contiguous() for name, rows in tensors.items()}


def _other_name(tensors: Tensors) -> Tensors:
    return {"x": tensors["input_ids"]}


@pytest.mark.parametrize(
    ("name", "change"), [("context/layer_001.safetensors", _fewer_rows), ("tokens.safetensors", _other_name)]
)
def test_files_that_contradict_the_manifest(place: Path, name: str, change: Any) -> None:
    change_tensors(place / "doc.skv", name, change)
    _longer()
    refused = run_here(*BUILD)
    assert refused.code == 1
    assert "the manifest of doc.skv contradicts itself" in refused.stderr
    assert "--force" in refused.stderr
    assert run_here(*BUILD, "--force").code == 0
    kept = {record["path"] for record in read_fields(place / "doc.skv")["files"].values()}
    there = {str(path.relative_to(place / "doc.skv")) for path in (place / "doc.skv").rglob("*.safetensors")}
    assert there == kept


def test_a_record_without_positions(place: Path) -> None:
    assert run_here("build-index", "doc.skv", "--model", "model", "--method", "csattention", "-q").code == 0

    def change(fields: Fields) -> None:
        del fields["files"]["samples/layer_000.safetensors"]["tensors"]["positions"]

    reseal(place / "doc.skv", change)
    refused = run_here(*BUILD, "--method", "csattention")
    assert refused.code == 1
    assert "the manifest of doc.skv contradicts itself: positions is not in samples/layer_000" in refused.stderr


def test_fewer_layers_than_the_model_has(place: Path) -> None:
    reseal(place / "doc.skv", lambda fields: fields.update(layers=fields["layers"][:1]))
    refused = run_here(*BUILD)
    assert refused.code == 1
    assert "the manifest of doc.skv contradicts itself: it has 1 layers, and its model " in refused.stderr
    assert run_here(*BUILD, "--force").code == 0


def test_rows_that_are_no_numbers_are_not_the_models_fault(place: Path) -> None:
    change_tensors(
        place / "doc.skv", "context/layer_001.safetensors", lambda rows: rows | {"keys": rows["keys"] * torch.nan}
    )
    _longer()
    refused = run_here(*BUILD)
    assert refused.code == 1
    assert "keys of layer 1 are not finite in float32" in refused.stderr
    assert "they were taken from doc.skv, whose rows are not finite either; build the index again" in refused.stderr
    assert run_here(*BUILD, "--force").code == 0


@pytest.mark.parametrize("note", ["x", {}, {"layers": [], "probe": {}}, {"layers": [{"a": 1}], "probe": []}, "empty"])
def test_a_note_of_an_interrupted_build_that_says_nothing(place: Path, note: Any) -> None:
    fields = read_fields(place / "doc.skv")
    note = {"layers": [], "probe": fields["probe"]} if note == "empty" else note
    notes = {fields["files"]["tokens.safetensors"]["recipe"]: note}
    (place / "doc.skv" / "unfinished.json").write_text(json.dumps({"files": {}, "paths": [], "notes": notes}))
    outcome = run_here("build-index", "doc.skv", "--model", "model", "--method", "pqcache", "-q")
    assert outcome.code == 0, outcome.stderr
    assert run_here("inspect", "--verify").code == 0
