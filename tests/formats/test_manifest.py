"""Each way in which a manifest can be wrong, and its one-line error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.manifest import read_manifest
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import MANIFEST, SCHEMA_VERSION, Manifest

Fields = dict[str, Any]


def refusal(folder: Path, exit_code: int = 1) -> str:
    """The error of reading a manifest: one line that names the folder."""
    with pytest.raises(ArtifactError) as error:
        read_manifest(folder)
    message = str(error.value)
    assert "\n" not in message
    assert str(folder) in message
    assert error.value.exit_code == exit_code
    return message


def change(folder: Path, edit: Callable[[Fields], object], *, seal: bool) -> None:
    """Edit a manifest's fields on disk; `seal` updates its own hash."""
    fields = json.loads((folder / MANIFEST).read_bytes())
    edit(fields)
    if seal:
        fields["manifest_sha256"] = hash_json({key: value for key, value in fields.items() if key != "manifest_sha256"})
    (folder / MANIFEST).write_text(json.dumps(fields))


def test_no_folder(tmp_path: Path) -> None:
    message = refusal(tmp_path / "other.skv", 2)
    assert message.startswith("no index at ")
    assert "sparsekv build-index" in message


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "some.skv").write_text("{}")
    assert refusal(tmp_path / "some.skv", 2).startswith("no index at ")


def test_unfinished(index: Path) -> None:
    (index / MANIFEST).unlink()
    message = refusal(index)
    assert "unfinished: manifest.json is missing" in message
    assert "again to resume" in message


@pytest.mark.parametrize(
    "data",
    [b"", b'{"schema_version": 1', b"\xff\x00rubbish", b"[1, 2]", b'"text"', b"null", b"{}", b"17"],
    ids=["empty", "cut off", "binary", "list", "text", "null", "no fields", "number"],
)
def test_damaged(index: Path, data: bytes) -> None:
    (index / MANIFEST).write_bytes(data)
    message = refusal(index)
    assert "is damaged" in message
    assert "--force" in message


def test_a_folder_in_the_manifests_place(index: Path) -> None:
    (index / MANIFEST).unlink()
    (index / MANIFEST).mkdir()
    assert "is damaged" in refusal(index)


@pytest.mark.parametrize("version", ["2", None, [2]], ids=repr)
def test_a_version_that_is_no_number(index: Path, version: object) -> None:
    change(index, lambda fields: fields.update(least_reader_version=version), seal=True)
    assert "is damaged" in refusal(index)


def test_written_for_newer_readers_alone(index: Path) -> None:
    newer = {"schema_version": SCHEMA_VERSION + 6, "least_reader_version": SCHEMA_VERSION + 4, "unknown": 1}
    change(index, lambda fields: fields.update(newer), seal=True)
    message = refusal(index)
    for number in (SCHEMA_VERSION + 6, SCHEMA_VERSION + 4, SCHEMA_VERSION):
        assert f" {number}" in message
    assert "upgrade sparsekv" in message


def test_a_newer_schema_that_this_version_may_read_opens(index: Path) -> None:
    def extend(fields: Fields) -> None:
        fields["schema_version"] = SCHEMA_VERSION + 1
        fields["new_field"] = fields["prompt"]["new_field"] = "of a later version"

    before = read_manifest(index)
    change(index, extend, seal=True)
    assert read_manifest(index).prompt == before.prompt
    assert list(Artifact(index).verify()) == list(before.files)


@pytest.mark.parametrize("field", sorted(Manifest.model_fields.keys() - {"least_reader_version"}))
def test_changed_by_hand(index: Path, field: str) -> None:
    change(index, lambda fields: fields.update({field: "by hand"}), seal=False)
    message = refusal(index)
    assert "changed since it was written" in message
    assert "--force" in message


def test_its_own_hash_is_missing(index: Path) -> None:
    change(index, lambda fields: fields.pop("manifest_sha256"), seal=False)
    assert "changed since it was written" in refusal(index)


def test_a_missing_field_is_named(index: Path) -> None:
    change(index, lambda fields: fields["prompt"].pop("tokens"), seal=True)
    message = refusal(index)
    assert "field prompt.tokens is not valid" in message
    assert "--force" in message


def test_a_wrong_value_is_named(index: Path) -> None:
    change(index, lambda fields: fields["layers"][0].update(softmax_scale="large"), seal=True)
    assert "field layers.0.softmax_scale is not valid" in refusal(index)
