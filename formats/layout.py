"""Shapes and dtypes that the tensors of an index must have, and the check that a manifest is consistent with them.

Axes are letters. Those of all files of a layer: N tokens, M of the middle, R of the tail, Hq query heads, Hk KV heads,
D channels. Those within one file: P sampled queries, C0, C1, ... clusters of each level, m subspaces of d channels,
C centroids, posting lists of L tokens.
"""

import re
from functools import cache
from pathlib import Path

from sparsekv.formats import int8_centroids
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.manifest import REBUILD
from sparsekv.formats.schema import TOKENS, FileRecord, Manifest, TensorRecord, layer_file

Letters = dict[str, int]
Shape = tuple[str, tuple[str, ...]]
"""A dtype (`rows` for that of the index, empty for any) and the axes; `X+1` is one more than X."""

_CONTEXT: dict[str, Shape] = {"keys": ("rows", ("Hk", "N", "D")), "values": ("rows", ("Hk", "N", "D"))}
_CONTEXT_INT8: dict[str, Shape] = {
    "keys": ("int8", ("Hk", "N", "D")),
    "values": ("int8", ("Hk", "N", "D")),
    "key_scales": ("bfloat16", ("Hk", "N")),
    "value_scales": ("bfloat16", ("Hk", "N")),
    "channel_scales": ("bfloat16", ("Hk", "D")),
    "channel_offsets": ("bfloat16", ("Hk", "D")),
}
_QUERIES: dict[str, Shape] = {"tail": ("rows", ("Hq", "R", "D")), "sink_logits": ("", ("Hq",))}
_SAMPLES: dict[str, Shape] = {"queries": ("rows", ("Hq", "P", "D")), "positions": ("int32", ("P",))}
_OF_LEVELS: dict[str, Shape] = {
    "centroids": ("rows", ("Hk", "C{level}", "D")),
    "lookup_centroids": ("rows", ("Hk", "C{level}", "D")),
    "value_centroids": ("rows", ("Hk", "C{level}", "D")),
    "counts": ("int32", ("Hk", "C{level}")),
    "parent": ("int32", ("Hk", "C{level}")),
}
_OF_METHODS: dict[str, Shape] = {
    "token_order": ("int32", ("Hk", "M")),
    "token_offsets": ("int32", ("Hk", "C0+1")),
    "block_offsets": ("int32", ("blocks+1",)),
    "block_clusters": ("int32", ("Hk", "blocks+1")),
    "channels": ("int32", ("m", "d")),
    "centroids": ("float16", ("Hk", "m", "C", "d")),
    "table_tokens": ("int32", ("Hk", "m", "C", "L")),
    "table_scores": ("float16", ("Hk", "m", "C", "L")),
    "key_mean": ("float32", ("Hk", "m", "d")),
    "part_weights": ("float32", ("Hk", "m")),
    "codes": ("uint8", ("Hk", "M", "m")),
    "codebooks": ("float16", ("Hk", "m", "C", "d")),
    "query_turn": ("float16", ("Hk", "D", "D")),
    "rest_bias": ("float32", ("Hk", "C0")),
    "rest_values": ("rows", ("Hk", "C0", "D")),
    "scores": ("float32", ("Hk", "M")),
}
_CENTROIDS_INT8: dict[str, Shape] = {
    int8_centroids.NAMES[name]: (dtype, tuple("C0" if axis == "N" else axis for axis in axes))
    for name, (dtype, axes) in _CONTEXT_INT8.items()
}
_LEVEL = re.compile(r"level(\d{1,2})\.(\w+)")


def in_this_form(manifest: Manifest) -> bool:
    """Whether keys and values in 8 bits, if an index has them, are stored as this version does it: formerly 64 tokens
    shared scales."""
    first = manifest.files[layer_file("context", 0)]
    return manifest.kv_storage is None or first.tensors.keys() >= _CONTEXT_INT8.keys()


def check_names(manifest: Manifest, folder: Path) -> None:
    """Raise ArtifactError if a manifest lacks a file that its layers need, whatever form this has."""
    needed = [layer_file(one, layer) for one in ("context", "queries") for layer in range(len(manifest.layers))]
    methods = [layer_file(one, layer) for one in manifest.methods for layer in manifest.indexed_layers]
    for name in (TOKENS, *needed, *methods):
        if name not in manifest.files:
            raise ArtifactError(f"the manifest of {folder} contradicts itself: {name} is not in it; {REBUILD}")


def check_layout(manifest: Manifest, folder: Path) -> None:
    """Raise ArtifactError if files are missing from a manifest, or the shapes of their tensors contradict each other.

    Tensors with names that are not listed here, which another package's method may have, are not checked.
    """
    split, remedy = manifest.split, f"the manifest of {folder} contradicts itself: {{}}; {REBUILD}"
    if split.tokens != manifest.prompt.tokens:
        raise ArtifactError(remedy.format(f"its split has {split.tokens} tokens, its prompt {manifest.prompt.tokens}"))
    if not manifest.indexed_layers:
        raise ArtifactError(remedy.format("no layer is indexed"))
    if any(token.position >= split.tokens for token in manifest.canary):
        raise ArtifactError(remedy.format("its canary is behind its prompt"))
    if len({record.path for record in manifest.files.values()}) < len(manifest.files):
        raise ArtifactError(remedy.format("two files lie at one path"))
    stored = manifest.kv_storage
    if stored is not None and len(stored.errors) != len(manifest.layers):
        told = f"errors of {len(stored.errors)} layers for {len(manifest.layers)}"
        raise ArtifactError(remedy.format(f"its kv_storage has {told}"))
    try:
        _check(TOKENS, manifest.files[TOKENS], {"input_ids": ("int64", ("N",))}, {"N": split.tokens}, manifest.dtype)
        indexed = set(manifest.indexed_layers)
        for layer in range(len(manifest.layers)):
            letters = {"N": split.tokens, "M": split.middle, "R": split.tail}
            _check_layer(manifest, layer, letters, indexed=layer in indexed)
    except KeyError as error:
        raise ArtifactError(remedy.format(f"{error.args[0]} is not in it")) from None
    except ValueError as error:
        raise ArtifactError(remedy.format(error)) from None


def _check_layer(manifest: Manifest, layer: int, letters: Letters, *, indexed: bool) -> None:
    context, queries = (layer_file(folder, layer) for folder in ("context", "queries"))
    rows = _CONTEXT if manifest.kv_storage is None else _CONTEXT_INT8
    _check_all(context, manifest.files[context], rows, letters, manifest.dtype)
    wanted = _QUERIES if manifest.layers[layer].attention_sinks else {"tail": _QUERIES["tail"]}
    _check(queries, manifest.files[queries], wanted, letters, manifest.dtype)
    rope = manifest.layers[layer].rope
    if rope is not None and 2 * len(rope.frequencies) > letters["D"]:
        raise ValueError(f"layer {layer} turns {len(rope.frequencies)} pairs of {letters['D']} channels")
    if letters["Hq"] % letters["Hk"]:
        raise ValueError(f"layer {layer} has {letters['Hq']} query heads on {letters['Hk']} KV heads")
    if not indexed:
        return
    samples = layer_file("samples", layer)
    if samples in manifest.files:
        _check(samples, manifest.files[samples], _SAMPLES, dict(letters), manifest.dtype)
    for method in manifest.methods:
        name = layer_file(method, layer)
        record = manifest.files[name]
        known = _known_shapes(name, record, in_8_bits=manifest.kv_storage is not None)
        _check(name, record, known, own := dict(letters), manifest.dtype)
        if own.get("m", 1) * own.get("d", own["D"]) != own["D"]:
            raise ValueError(f"{name} has {own['m']} parts of {own['d']} channels for {own['D']}")
        if own.get("L", 1) > own["M"]:
            raise ValueError(f"{name} has lists of {own['L']} tokens, and the middle {own['M']}")


def first_axis(folder: str, tensor: str) -> str | None:
    """The letter of a tensor's first axis, in the files of one folder of an index; None for one not listed here."""
    known = {"context": _CONTEXT_INT8, "queries": _QUERIES, "samples": _SAMPLES}
    shape = known[folder].get(tensor) if folder in known else _CENTROIDS_INT8.get(tensor) or _of_method(tensor)
    return None if shape is None else shape[1][0]


def _check_all(name: str, record: FileRecord, wanted: dict[str, Shape], letters: Letters, rows: str) -> None:
    """`_check`, and ValueError for a tensor that is not wanted: scales decide how a context is read."""
    _check(name, record, wanted, letters, rows)
    if more := sorted(record.tensors.keys() - wanted.keys()):
        raise ValueError(f"{name} has a tensor {more[0][:80]}, which keys and values so stored have not")


def _known_shapes(name: str, record: FileRecord, *, in_8_bits: bool) -> dict[str, Shape]:
    """The shapes that tensors of a method's file must have, with all that centroids in 8 bits need if one is there.

    Raises:
        ValueError: centroids in 8 bits in an index that stores none so.
    """
    known = {tensor: shape for tensor in record.tensors if (shape := _of_method(tensor)) is not None}
    scales = sorted(record.tensors.keys() & int8_centroids.SCALES)
    if not scales:
        return known
    if not in_8_bits:
        raise ValueError(f"{name} has a tensor {scales[0]}, and the index stores nothing in 8 bits")
    has_values = any("value" in tensor for tensor in record.tensors.keys() & _CENTROIDS_INT8.keys())
    return known | {tensor: shape for tensor, shape in _CENTROIDS_INT8.items() if has_values or "value" not in tensor}


@cache
def _of_method(tensor: str) -> Shape | None:
    if level := _LEVEL.fullmatch(tensor):
        shape = _OF_LEVELS.get(level[2])
        return None if shape is None else (shape[0], tuple(axis.format(level=int(level[1])) for axis in shape[1]))
    return _OF_METHODS.get(tensor)


def _check(name: str, record: FileRecord, wanted: dict[str, Shape], letters: Letters, rows: str) -> None:
    """Raise ValueError for a tensor that does not fit; the first tensor with a letter sets the letter's size."""
    for tensor, (dtype, axes) in wanted.items():
        if tensor not in record.tensors:
            raise ValueError(f"{tensor} is not in {name}")
        if not _fits(record.tensors[tensor], rows if dtype == "rows" else dtype, axes, letters):
            shape = ", ".join(map(str, record.tensors[tensor].shape))
            raise ValueError(f"{tensor} of {name} is {record.tensors[tensor].dtype} [{shape}]")


def _fits(found: TensorRecord, dtype: str, axes: tuple[str, ...], letters: Letters) -> bool:
    if (dtype and found.dtype != dtype) or len(found.shape) != len(axes):
        return False
    for size, axis in zip(found.shape, axes, strict=True):
        count = size - 1 if axis.endswith("+1") else size
        if count < 1 or letters.setdefault(axis.removesuffix("+1"), count) != count:
            return False
    return True
