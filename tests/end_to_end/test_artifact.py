"""An index of the real model checked from outside: nothing but safetensors, numpy and hashlib."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from sparsekv.formats.index.reader import Artifact


def _tensors(path: Path) -> dict[str, np.ndarray]:
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)


@pytest.fixture(scope="module")
def folder(index: Artifact) -> Path:
    return index.folder


@pytest.fixture(scope="module")
def manifest(folder: Path) -> dict:  # type: ignore[type-arg]  # JSON as it is read
    return json.loads((folder / "manifest.json").read_text())  # type: ignore[no-any-return]


def test_every_file_is_as_the_manifest_says(folder: Path, manifest: dict) -> None:  # type: ignore[type-arg]
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")}
    assert found == {record["path"] for record in manifest["files"].values()}
    for record in manifest["files"].values():
        data = (folder / record["path"]).read_bytes()
        assert len(data) == record["bytes"]
        assert hashlib.sha256(data).hexdigest() == record["sha256"]
        tensors = _tensors(folder / record["path"])
        assert {name: {"shape": list(t.shape), "dtype": str(t.dtype)} for name, t in tensors.items()} == record[
            "tensors"
        ]


def test_tokens_are_the_prompt(folder: Path, manifest: dict) -> None:  # type: ignore[type-arg]
    ids = _tensors(folder / "tokens.safetensors")["input_ids"]
    assert ids.dtype == np.int64
    assert hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest() == manifest["prompt"]["ids_sha256"]
    assert len(ids) == manifest["prompt"]["tokens"] == sum(manifest["split"].values())


@pytest.mark.parametrize("layer", [0, 7, 29])
def test_clusters_are_what_they_claim(folder: Path, manifest: dict, layer: int) -> None:  # type: ignore[type-arg]
    keys = _tensors(folder / f"context/layer_{layer:03d}.safetensors")["keys"].astype(np.float64)
    built = _tensors(folder / f"squeezed/layer_{layer:03d}.safetensors")
    sinks, middle = manifest["split"]["sinks"], manifest["split"]["middle"]
    for head in range(keys.shape[0]):
        order, offsets = built["token_order"][head], built["token_offsets"][head]
        assert np.array_equal(np.sort(order), np.arange(sinks, sinks + middle))
        assert offsets[0] == 0
        assert offsets[-1] == middle
        assert np.array_equal(np.diff(offsets), built["level0.counts"][head])
        member = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        for level in (0, 1):
            centroids, counts = built[f"level{level}.centroids"][head], built[f"level{level}.counts"][head]
            assert np.array_equal(np.bincount(member, minlength=len(counts)), counts)
            for cluster in np.flatnonzero(counts):
                mean = keys[head, order[member == cluster]].mean(0)
                assert np.linalg.norm(centroids[cluster] - mean) <= 1e-5 * np.linalg.norm(mean) + 1e-6
            if level == 0:
                parents = built["level0.parent"][head]
                assert np.all(np.diff(parents[counts > 0]) >= 0), "children of one parent are neighbours"
                member = parents[member]


def test_held_out_queries_and_context_have_the_shapes_of_the_model(folder: Path, manifest: dict) -> None:  # type: ignore[type-arg]
    config, tokens = manifest["model"]["kv_config"], manifest["prompt"]["tokens"]
    context = _tensors(folder / "context/layer_000.safetensors")
    tail = _tensors(folder / "queries/layer_000.safetensors")["tail"]
    assert context["keys"].shape == context["values"].shape == (config["num_key_value_heads"], tokens, 64)
    assert tail.shape == (config["num_attention_heads"], manifest["split"]["tail"], 64)
