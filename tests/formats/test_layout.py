"""A manifest that contradicts itself or the files beside it is refused on opening."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.artifacts import CONTEXT, METHOD, QUERIES, small_artifact
from support.earlier_forms import in_blocks
from support.sealing import Tensors, change_tensors, reseal

from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.context_rows import quantise, with_centroids_in_8_bits
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import TOKENS

Fields = dict[str, Any]


def _shape(file: str, tensor: str, shape: list[int]) -> Callable[[Fields], None]:
    def change(fields: Fields) -> None:
        fields["files"][file]["tensors"][tensor]["shape"] = shape

    return change


def _dtype(file: str, tensor: str, dtype: str) -> Callable[[Fields], None]:
    def change(fields: Fields) -> None:
        fields["files"][file]["tensors"][tensor]["dtype"] = dtype

    return change


def _set(path: str, value: object) -> Callable[[Fields], None]:
    def change(fields: Fields) -> None:
        *above, last = path.split(".")
        for part in above:
            fields = fields[int(part)] if part.isdigit() else fields[part]
        fields[last] = value

    return change


CONTRADICTIONS: dict[str, tuple[Callable[[Fields], None], str]] = {
    "sinks": (_set("split.sinks", 5000), "its split has 5036 tokens, its prompt 40"),
    "tokens": (_set("prompt.tokens", 41), "its prompt 41"),
    "every layer slides": (_set("layers.0.sliding_window", 8), "no layer is indexed"),
    "keys": (_shape(CONTEXT, "keys", [2, 41, 8]), f"keys of {CONTEXT} is float32 \\[2, 41, 8\\]"),
    "values": (_shape(CONTEXT, "values", [2, 40, 9]), "values of"),
    "rank": (_shape(CONTEXT, "keys", [2, 320]), "keys of"),
    "no heads": (_shape(CONTEXT, "keys", [0, 40, 8]), "keys of"),
    "queries": (_shape(QUERIES, "tail", [4, 13, 8]), "tail of"),
    "heads": (_shape(QUERIES, "tail", [3, 12, 8]), "layer 0 has 3 query heads on 2 KV heads"),
    "ids": (_shape(TOKENS, "input_ids", [39]), "input_ids of"),
    "ids' dtype": (_dtype(TOKENS, "input_ids", "int32"), "input_ids of"),
    "centroids": (_shape(METHOD, "level0.centroids", [2, 5, 9]), "level0.centroids of"),
    "counts": (_shape(METHOD, "level0.counts", [2, 6]), "level0.counts of"),
    "counts' dtype": (_dtype(METHOD, "level0.counts", "int64"), "level0.counts of"),
    "dtype": (_set("dtype", "float16"), "keys of"),
    "rope": (_set("layers.0.rope", {"frequencies": [1.0] * 5, "interleaved": False}), "layer 0 rotates 5 pairs of 8"),
    "a sink logit": (_set("layers.0.attention_sinks", True), f"sink_logits is not in {QUERIES}"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_named(index: Path, name: str) -> None:
    change, says = CONTRADICTIONS[name]
    reseal(index, change)
    with pytest.raises(ArtifactError, match=f"contradicts itself: .*{says}.*--force"):
        Artifact(index)


@pytest.mark.parametrize("file", [TOKENS, CONTEXT, QUERIES, METHOD])
def test_a_file_that_is_not_recorded_is_named(index: Path, file: str) -> None:
    reseal(index, lambda fields: fields["files"].pop(file))
    with pytest.raises(ArtifactError, match=f"contradicts itself: {file} is not in it"):
        Artifact(index)


SCALES = "level0.centroid_scales"


def _int8_index(folder: Path) -> None:
    """The small index with its keys, values and centroids in 8 bits."""
    change_tensors(folder, CONTEXT, lambda tensors: quantise(tensors["keys"], tensors["values"]))
    change_tensors(folder, METHOD, with_centroids_in_8_bits)
    storage = {"dtype": "int8", "errors": [0.01], "measured_ids": "0" * 64, "measured_tokens": 40}
    reseal(folder, lambda fields: fields.update(kv_storage=storage))


INT8_CONTRADICTIONS: dict[str, tuple[Callable[[Fields], None], str]] = {
    "numbers": (_dtype(CONTEXT, "keys", "float32"), f"keys of {CONTEXT} is float32"),
    "values": (_shape(CONTEXT, "values", [2, 39, 8]), f"values of {CONTEXT} is int8 \\[2, 39, 8\\]"),
    "too few scales": (_shape(CONTEXT, "value_scales", [2, 39]), f"value_scales of {CONTEXT}"),
    "scales' dtype": (_dtype(CONTEXT, "value_scales", "float32"), f"value_scales of {CONTEXT} is float32"),
    "too few of keys": (_shape(CONTEXT, "key_scales", [2, 39]), f"key_scales of {CONTEXT}"),
    "channels' scales": (_shape(CONTEXT, "channel_scales", [2, 7]), f"channel_scales of {CONTEXT}"),
    "channels' offsets": (_shape(CONTEXT, "channel_offsets", [1, 8]), f"channel_offsets of {CONTEXT}"),
    "no offsets": (
        lambda fields: fields["files"][CONTEXT]["tensors"].pop("channel_offsets"),
        "channel_offsets is not in",
    ),
    "not said": (_set("kv_storage", None), f"keys of {CONTEXT} is int8"),
    "centroids": (_dtype(METHOD, "level0.centroids", "float32"), f"level0.centroids of {METHOD} is float32"),
    "centroids of the wrong size": (
        _shape(METHOD, "level0.centroids", [2, 4, 8]),
        f"level0.centroids of {METHOD} is int8",
    ),
    "centroids' scales": (_shape(METHOD, SCALES, [2, 4]), f"{SCALES} of {METHOD} is bfloat16"),
    "no offsets of centroids": (
        lambda fields: fields["files"][METHOD]["tensors"].pop("level0.centroid_channel_offsets"),
        "level0.centroid_channel_offsets is not in",
    ),
    "errors": (_set("kv_storage.errors", [0.1, 0.2]), "its kv_storage has errors of 2 layers for 1"),
}


@pytest.mark.parametrize("name", INT8_CONTRADICTIONS)
def test_a_contradiction_about_8_bits_is_named(index: Path, name: str) -> None:
    _int8_index(index)
    assert Artifact(index).context(0)[0].dtype == torch.float32
    change, says = INT8_CONTRADICTIONS[name]
    reseal(index, change)
    with pytest.raises(ArtifactError, match=f"contradicts itself: .*{says}.*--force"):
        Artifact(index)


def test_scales_beside_exact_keys_are_refused(index: Path) -> None:
    """The scales would decide how the keys are read."""
    scales = torch.ones(2, 40, dtype=torch.bfloat16)
    change_tensors(index, CONTEXT, lambda tensors: tensors | {"key_scales": scales})
    with pytest.raises(ArtifactError, match=f"contradicts itself: {CONTEXT} has a tensor key_scales"):
        Artifact(index)


def test_scales_of_values_without_values_are_refused(index: Path) -> None:
    """The scales would be taken for the scales of keys."""
    _int8_index(index)
    scales = torch.ones(2, 5, dtype=torch.bfloat16)
    change_tensors(index, METHOD, lambda tensors: tensors | {"level0.value_centroid_scales": scales})
    with pytest.raises(ArtifactError, match=f"level0.value_centroids is not in {METHOD}"):
        Artifact(index)


def test_centroids_in_8_bits_beside_exact_keys_are_refused(index: Path) -> None:
    """No kernel reads both."""
    change_tensors(index, METHOD, with_centroids_in_8_bits)
    with pytest.raises(ArtifactError, match=f"{METHOD} has a tensor level0.centroid_.*stores nothing in 8 bits"):
        Artifact(index)


def test_keys_in_8_bits_of_an_earlier_form_are_refused(index: Path) -> None:
    """Then 64 tokens shared scales and offsets: read as today's they would be other keys."""
    _int8_index(index)
    change_tensors(index, CONTEXT, in_blocks)
    with pytest.raises(ArtifactError) as refused:
        Artifact(index)
    assert str(refused.value) == (
        f"the manifest of {index} contradicts itself: key_scales of {CONTEXT} is bfloat16 [2, 1, 8], "
        "which does not fit bfloat16 [Hk, N] with Hk = 2, N = 40; build the index again from its document, with --force"
    )


@pytest.mark.parametrize("field", ["dtype", "errors", "measured_tokens"])
def test_an_odd_record_of_storage_is_refused(index: Path, field: str) -> None:
    _int8_index(index)
    wrong = {"dtype": "int4", "errors": [-1.0], "measured_tokens": 0}[field]
    reseal(index, _set(f"kv_storage.{field}", wrong))
    with pytest.raises(ArtifactError, match=f"field kv_storage.{field}"):
        Artifact(index)


def test_an_index_that_says_nothing_of_storage_holds_exact_rows(index: Path) -> None:
    """As those of earlier versions."""
    reseal(index, lambda fields: fields.pop("kv_storage"))
    assert Artifact(index).manifest.kv_storage is None


def _renamed(tensors: Tensors) -> Tensors:
    first = next(iter(tensors))
    return {"other" if name == first else name: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("file", [TOKENS, CONTEXT, QUERIES])
def test_a_tensor_that_is_missing_is_named(index: Path, file: str) -> None:
    change_tensors(index, file, _renamed)
    with pytest.raises(ArtifactError, match=f"is not in {file}"):
        Artifact(index)


def test_a_file_with_other_tensors_than_its_record_is_told_when_it_is_read(tmp_path: Path, index: Path) -> None:
    small_artifact(tmp_path / "other.skv")
    change_tensors(tmp_path / "other.skv", METHOD, lambda tensors: tensors | {"more": torch.zeros(3)})
    data = (tmp_path / "other.skv" / METHOD).read_bytes()
    (index / METHOD).write_bytes(data)
    reseal(index, lambda fields: fields["files"][METHOD].update(bytes=len(data), sha256=hash_bytes(data)))
    artifact = Artifact(index)
    with pytest.raises(ArtifactError, match="holds other tensors than its manifest says"):
        artifact.method_tensors("squeezed", 0)


def test_a_small_file_with_another_sum_is_told_when_it_is_read(index: Path) -> None:
    data = bytearray((index / METHOD).read_bytes())
    data[-1] ^= 1
    (index / METHOD).write_bytes(data)
    artifact = Artifact(index)
    remedy = f"build it again with `sparsekv build-index {index} --method squeezed`"
    with pytest.raises(ArtifactError, match=f"its sha256 does not match; {remedy}"):
        artifact.method_tensors("squeezed", 0)
    with pytest.raises(ArtifactError, match="its sha256 does not match"):
        Artifact(index).check_sums([METHOD])


def test_whoever_measures_is_told_of_every_file(index: Path) -> None:
    data = bytearray((index / CONTEXT).read_bytes())
    data[-1] ^= 1
    (index / CONTEXT).write_bytes(data)
    Artifact(index).context(0)
    with pytest.raises(ArtifactError, match="its sha256 does not match"):
        Artifact(index, thorough=True).context(0)


def test_whoever_measures_is_told_of_numbers_that_are_not_finite(index: Path) -> None:
    change_tensors(index, CONTEXT, lambda tensors: tensors | {"keys": tensors["keys"] * torch.nan})
    with pytest.raises(ArtifactError, match=r"keys in .* holds numbers that are not finite"):
        Artifact(index, thorough=True).context(0)
