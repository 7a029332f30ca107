"""A finished index: it reads back as written, and any damage is detected and named."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from support.artifacts import (
    CONTEXT,
    METHOD,
    QUERIES,
    assert_holds,
    small_files,
    small_manifest,
    small_recipe,
)

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.reader import Artifact, map_tensors
from sparsekv.formats.index.schema import MANIFEST, TOKENS
from sparsekv.formats.index.writer import ArtifactWriter

FILES = small_files()


def test_each_part_comes_back_as_it_was_written(index: Path) -> None:
    artifact = Artifact(index)
    keys, values = artifact.context(0)
    assert torch.equal(keys, FILES[CONTEXT]["keys"])
    assert torch.equal(values, FILES[CONTEXT]["values"])
    assert torch.equal(artifact.input_ids(), FILES[TOKENS]["input_ids"])
    assert torch.equal(artifact.queries(0)["tail"], FILES[QUERIES]["tail"])
    centroids = artifact.method_tensors("squeezed", 0)["level0.centroids"]
    assert torch.equal(centroids, FILES[METHOD]["level0.centroids"])


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(index: Path, name: str) -> None:
    (index / name).unlink()
    with pytest.raises(ArtifactError, match=f"{name} of {index} is missing; build (it|the index) again"):
        Artifact(index)


@pytest.mark.parametrize("change", [-1, 1], ids=["shorter", "longer"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_length_is_named(index: Path, name: str, change: int) -> None:
    data = (index / name).read_bytes()
    (index / name).write_bytes(data[:-1] if change < 0 else data + b"\0")
    with pytest.raises(ArtifactError, match=f"{name} of {index} .* {len(data) + change} bytes, not {len(data)}"):
        Artifact(index)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_and_named(index: Path, name: str) -> None:
    data = bytearray((index / name).read_bytes())
    data[len(data) * 2 // 3] ^= 0x10
    (index / name).write_bytes(data)
    found: list[str] = []
    with pytest.raises(ArtifactError, match=f"{name} of {index} is damaged: its sha256 does not match; build"):
        found.extend(Artifact(index).verify())
    assert name not in found


def test_a_damaged_file_is_named_as_it_is_on_disk(index: Path) -> None:
    """A build in an index's place writes its files beside the old ones, under other names."""
    with ArtifactWriter(index) as writer:
        for name, tensors in small_files(1, 1).items():
            writer.write(name, tensors, small_recipe(name, 1, 1))
        writer.finish(small_manifest(1, 1))
    path = json.loads((index / MANIFEST).read_text())["files"][CONTEXT]["path"]
    assert path != CONTEXT
    data = bytearray((index / path).read_bytes())
    data[-1] ^= 1
    (index / path).write_bytes(data)
    with pytest.raises(ArtifactError, match=f"^{path} of {index} is damaged"):
        list(Artifact(index).verify())
    (index / path).unlink()
    with pytest.raises(ArtifactError, match=f"^{path} of {index} is missing"):
        Artifact(index)


def test_verify_names_every_file(index: Path) -> None:
    assert list(Artifact(index).verify()) == list(FILES)


def test_a_file_that_is_no_tensor_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"rubbish" * 100)
    with (tmp_path / "file").open("rb") as file, pytest.raises(ArtifactError, match="cannot read some file"):
        map_tensors(file.fileno(), "some file")


def test_an_index_can_be_checked_without_this_program(index: Path) -> None:
    manifest = json.loads((index / MANIFEST).read_text())
    assert manifest["files"].keys() == FILES.keys()
    for name, record in manifest["files"].items():
        data = (index / record["path"]).read_bytes()
        assert len(data) == record["bytes"]
        assert hashlib.sha256(data).hexdigest() == record["sha256"]
        arrays = load_file(index / record["path"])
        assert {key: {"shape": list(array.shape), "dtype": str(array.dtype)} for key, array in arrays.items()} == (
            record["tensors"]
        )
        assert all((arrays[key] == tensor.numpy()).all() for key, tensor in FILES[name].items())


def test_an_open_index_stays_readable_while_another_is_built_in_its_place(index: Path) -> None:
    opened = Artifact(index)
    mapped = opened.context(0)[0]
    with ArtifactWriter(index) as writer:
        for name, tensors in small_files(1, 1).items():
            writer.write(name, tensors, small_recipe(name, 1, 1))
            assert list(opened.verify()) == list(FILES)
            assert_holds(index)
        writer.finish(small_manifest(1, 1))
    assert_holds(index, context=1, method=1)
    assert torch.equal(mapped, FILES[CONTEXT]["keys"])
