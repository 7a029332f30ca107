"""Damaged and unfinished indices: each is told in one line, and what the line says mends it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.command import fails, run_here

from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.index.manifest import manifest_bytes, read_manifest


def _truncate(folder: Path) -> None:
    os.truncate(folder / "context" / "layer_001.safetensors", 1000)


def _remove_layer(folder: Path) -> None:
    (folder / "squeezed" / "layer_002.safetensors").unlink()


def _newer(folder: Path) -> None:
    newer = read_manifest(folder).model_copy(update={"schema_version": 9, "least_reader_version": 9})
    (folder / "manifest.json").write_bytes(manifest_bytes(newer)[0])


def _edited(folder: Path) -> None:
    fields = json.loads((folder / "manifest.json").read_text())
    fields["split"]["sinks"] = 5
    (folder / "manifest.json").write_text(json.dumps(fields))


def _contradicting(folder: Path) -> None:
    whole = read_manifest(folder)
    files = {name: record for name, record in whole.files.items() if name != "context/layer_000.safetensors"}
    (folder / "manifest.json").write_bytes(manifest_bytes(whole.model_copy(update={"files": files}))[0])


def _strange_tokens(folder: Path) -> None:
    """As somebody else's index may have them; its checksums are right."""
    whole = read_manifest(folder)
    save_file({"input_ids": torch.full((whole.split.tokens,), 2**40)}, folder / "tokens.safetensors")
    data = (folder / "tokens.safetensors").read_bytes()
    record = whole.files["tokens.safetensors"]
    changed = record.model_copy(update={"bytes": len(data), "sha256": hash_bytes(data)})
    files = whole.files | {"tokens.safetensors": changed}
    (folder / "manifest.json").write_bytes(manifest_bytes(whole.model_copy(update={"files": files}))[0])


def _unfinished(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_truncate, ("context/layer_001.safetensors", "truncated", "writes anew")),
        (
            _remove_layer,
            ("squeezed/layer_002.safetensors", "missing", "`sparsekv build-index doc.skv --method squeezed`"),
        ),
        (_newer, ("schema 9", "upgrade")),
        (_edited, ("changed since it was written", "--force")),
        (_unfinished, ("unfinished", "manifest.json", "again")),
    ],
)
def test_damage(place: Path, damage: Callable[[Path], None], says: tuple[str, ...]) -> None:
    damage(place / "doc.skv")
    for command in (("generate", "Why?"), ("recall-report",), ("inspect",)):
        fails(1, *command, says=("doc.skv", *says))


def test_an_index_that_contradicts_itself_is_told_before_it_is_built_upon(place: Path) -> None:
    _contradicting(place / "doc.skv")
    build = ("build-index", "doc.txt", "--model", "model")
    fails(1, *build, says=("doc.skv contradicts itself: context/layer_000.safetensors is not in it", "--force"))
    assert run_here(*build, "--force", "-q").code == 0


def test_a_record_without_parameters_cannot_take_generated_tokens(place: Path) -> None:
    """With --stream, generated tokens join clusters by the indexer's parameters. Without --stream nothing needs
    them."""
    whole = read_manifest(place / "doc.skv")
    methods = whole.methods | {"multipole": whole.methods["multipole"].model_copy(update={"parameters": {}})}
    (place / "doc.skv" / "manifest.json").write_bytes(manifest_bytes(whole.model_copy(update={"methods": methods}))[0])
    ask = ("generate", "-i", "doc.skv", "Why?", "--model", "model", "--method", "multipole", "--max-new-tokens", "2")
    assert run_here(*ask, "-q").code == 0
    says = ("multipole of doc.skv does not have the tensors and parameters that this version builds", "--force")
    fails(1, *ask, "--stream", says=says)


def test_tokens_that_no_tokenizer_has_give_no_words(place: Path) -> None:
    _strange_tokens(place / "doc.skv")
    inspected = run_here("inspect", "--method", "all", "--model", "model", "--html", "x.html")
    assert inspected.code == 0, inspected.stderr
    assert "no words, only counts: doc.skv has token ids that the tokenizer of model does not have" in inspected.stderr
    fails(1, "generate", "Why?", says=("has token ids that its model does not have",))


@pytest.mark.parametrize("damage", [_truncate, _remove_layer])
def test_a_build_writes_anew_what_is_missing_and_loses_no_method(place: Path, damage: Callable[[Path], None]) -> None:
    before = read_manifest(place / "doc.skv")
    damage(place / "doc.skv")
    built = run_here("build-index", "doc.txt", "--model", "model", "--method", "codes")
    assert "of doc.skv: built again, because files are missing" in built.stderr
    after = read_manifest(place / "doc.skv")
    assert list(after.methods) == [*before.methods, "codes"]
    assert {name.partition("/")[0] for name in after.files} - {"samples"} == {
        *(name.partition("/")[0] for name in before.files),
        "codes",
    }
    assert run_here("inspect", "--verify", "-q").code == 0


def test_a_method_with_a_changed_file_is_not_kept_and_this_is_told(place: Path) -> None:
    path = place / "doc.skv" / "squeezed" / "layer_001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    built = run_here("build-index", "doc.txt", "--model", "model", "--method", "codes")
    assert "squeezed is not kept" in built.stderr
    assert "`sparsekv build-index doc.skv --method squeezed` builds it again" in built.stderr
    assert not any(name.startswith("squeezed/") for name in read_manifest(place / "doc.skv").files)


def test_a_damaged_index_with_appended_text_is_told_to_append_it_again(place: Path) -> None:
    assert run_here("append", "doc.txt", "--rebuild", "-q").code == 0
    next((place / "doc.skv" / "queries").iterdir()).unlink()
    fails(1, "inspect", says=("missing", "with --force, and append again"))


def test_a_method_that_lacks_a_file_is_built_again_as_the_message_says_also_of_an_appended_text(place: Path) -> None:
    assert run_here("append", "doc.txt", "--rebuild", "-q").code == 0
    before = read_manifest(place / "doc.skv")
    for name in ("squeezed", "multipole"):
        next((place / "doc.skv" / name).iterdir()).unlink()
    command = ("build-index", "doc.skv", "--method", "multipole")
    fails(1, "generate", "Why?", says=("is missing", f"`sparsekv {' '.join(command)}`"))
    assert run_here(*command, "-q").code == 0
    after = read_manifest(place / "doc.skv")
    assert (list(after.methods), after.additions) == (list(before.methods), before.additions)
    assert run_here("inspect", "--verify", "-q").code == 0


def test_one_flipped_byte_is_found_by_verify_and_by_whoever_measures(place: Path) -> None:
    path = place / "doc.skv" / "context" / "layer_001.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    for measuring in (("inspect", "--verify"), ("inspect", "--method", "all"), ("recall-report", "--method", "window")):
        told = run_here(*measuring, "-q").error()
        assert told.startswith("context/layer_001.safetensors of doc.skv is damaged: its sha256 does not match; ")
        assert told.endswith("; build the index again from its document, which writes anew what is missing or damaged")
    assert run_here("build-index", "doc.txt", "--model", "model", "-q").code == 0
    assert run_here("inspect", "--verify", "-q").code == 0


def test_a_header_that_is_damaged_needs_no_force(place: Path) -> None:
    path = place / "doc.skv" / "context" / "layer_001.safetensors"
    header = path.read_bytes()
    for damage in (header.replace(b"keys", b"kexs"), b"\xff" * 8 + header[8:]):
        path.write_bytes(damage)
        told = run_here("generate", "Why?", "--model", "model", "-q").error()
        assert told.endswith("; build the index again from its document, which writes anew what is missing or damaged")
    assert run_here("build-index", "doc.txt", "--model", "model", "-q").code == 0
    assert run_here("inspect", "--verify", "-q").code == 0
