"""Check the shapes, dtypes and value ranges that the tensors of an index must have."""

import re
import reprlib
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sparsekv.formats.errors import REBUILD, ArtifactError
from sparsekv.formats.index import context_rows
from sparsekv.formats.index.context_rows import CENTROID_NAMES, bounds, numbers_of
from sparsekv.formats.index.growing_file import STORED_DTYPES, tensor_records
from sparsekv.formats.index.schema import (
    MOST_AXES,
    TOKENS,
    LayerFacts,
    Manifest,
    Split,
    TensorRecord,
    layer_file,
    state_file,
)

Tensors = dict[str, torch.Tensor]
IN_EVERY = {"value_centroids", "lookup_centroids"}
"""Names of tensors that either every cluster level has or none has."""
Faults = dict[str, torch.Tensor]
"""Maps the name of each checked tensor to a bool on the tensor's device: True if the tensor holds invalid values."""


def not_finite(tensors: Tensors) -> str | None:
    """Return the name of the first tensor that holds a NaN or infinity; None if all are finite."""
    return _first({name: ~_is_finite(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()})


def check_values(tensors: Tensors, split: Split, what: str) -> None:
    """Raise ArtifactError if the values of a method's tensors of one layer are invalid.

    Values are invalid if an index is out of bounds, a number is not finite, or tokens or channels are missing or in
    the wrong order. Inconsistent clusters, and a missing or misnamed tensor of clusters, are errors too.

    Args:
        tensors: tensors with the shapes that this module requires, on the device that will use them. Token positions
            count from the beginning of the prompt.
        what: the name of the tensors in the message.
    """
    if fault := value_fault(tensors, split, what):
        raise ArtifactError(f"{fault}; {REBUILD}")


def value_fault(tensors: Tensors, split: Split, what: str) -> str | None:
    """Return the first fault that `check_values` refuses; None: the values are valid."""
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    scales = {CENTROID_NAMES[name]: largest for name, largest in bounds(numbers_of(tensors) or {}).items()}
    faults = {name: ~_is_finite(tensor) for name, tensor in (floating | scales).items()}
    try:
        faults |= _positions(tensors, split) | _clusters(tensors, split.middle) | _blocks(tensors, split)
        wrong = _first(faults | _codes(tensors))
    except KeyError as error:
        return f"{error.args[0]} is not in {what}"
    except ValueError as error:
        return f"{what} has a tensor {error.args[0]}, but tensors of clusters are named levelN.NAME"
    return None if wrong is None else f"{wrong} in {what} holds numbers that no build writes"


def _first(faults: Faults) -> str | None:
    if not faults:
        return None
    found = torch.stack(list(faults.values())).tolist()
    return next((name for name, is_wrong in zip(faults, found, strict=True) if is_wrong), None)


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel() or tensor.dtype.itemsize == 1:  # aminmax does not support these
        return tensor.float().isfinite().all()
    # Minimum and maximum suffice, because NaN propagates to them. This is many times as fast as testing each number.
    return torch.stack(torch.aminmax(tensor)).isfinite().all()


def _outside(tensor: torch.Tensor, first: int, end: int) -> torch.Tensor:
    if not tensor.numel():
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    least, most = torch.aminmax(tensor)
    return (least < first) | (most >= end)


def _positions(tensors: Tensors, split: Split) -> Faults:
    """Check positions: all are in the middle, and the positions of sampled queries ascend.

    `token_order` must have each token of the middle once in each head.
    """
    first, end = split.sinks, split.sinks + split.middle
    listed = [name for name in tensors if name in ("table_tokens", "positions")]
    faults = {name: _outside(tensors[name], first, end) for name in listed}
    if "positions" in tensors:
        faults["positions"] |= (tensors["positions"].diff() < 1).any()
    if "token_order" in tensors:
        order = tensors["token_order"].long() - first
        seen = torch.zeros(order.shape, dtype=torch.bool, device=order.device)
        seen.scatter_(1, order.clamp(0, split.middle - 1), True)
        faults["token_order"] = _outside(order, 0, split.middle) | ~seen.all()
    return faults


def _clusters(tensors: Tensors, middle: int) -> Faults:
    """Check clusters: each level's counts sum to `middle` tokens, parents are valid, and offsets match counts.

    Raises:
        KeyError, ValueError: as `_levels`.
    """
    faults = {}
    for level in range(_levels(tensors)):
        counts = tensors[f"level{level}.counts"]
        faults[f"level{level}.counts"] = _outside(counts, 0, middle + 1) | (counts.sum(1) != middle).any()
        if level:
            name = f"level{level - 1}.parent"
            faults[name] = _wrong_parents(tensors[name], tensors[f"level{level - 1}.counts"], counts)
    if "token_offsets" in tensors:
        offsets, counts = tensors["token_offsets"], tensors["level0.counts"]
        faults["token_offsets"] = (offsets[:, :1] != 0).any() | (offsets.diff(dim=1) != counts).any()
    return faults


def _levels(tensors: Tensors) -> int:
    """Count the cluster levels.

    Raises:
        KeyError: a level lacks a required tensor, or a tensor of `IN_EVERY` that another level has.
        ValueError: its argument is a tensor's name that begins with `level` and is not `levelN.NAME`.
    """
    numbers, parts = set[int](), set[str]()
    for name in tensors:
        if name.startswith("level"):
            if (match := _LEVEL.fullmatch(name)) is None:
                raise ValueError(name)
            numbers.add(int(match[1]))
            parts.add(match[2])
    for level in range(len(numbers)):
        for part in ("centroids", "counts", *(["parent"] if level + 1 < len(numbers) else []), *(parts & IN_EVERY)):
            _ = tensors[f"level{level}.{part}"]
    return len(numbers)


def _wrong_parents(parents: torch.Tensor, counts: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """Whether the parents [Hk, C] of a level's C clusters are invalid.

    Parents are invalid if one is out of bounds, or if the counts of a parent's children do not sum to the parent's
    count. Parents must also not descend, so that a parent's children are contiguous. Among the children of one parent,
    a cluster without tokens must not precede one with tokens.

    Args:
        counts: [Hk, C], number of tokens of each cluster.
        above: [Hk, P], number of tokens of each cluster of the next coarser level, which has the parents.
    """
    within = parents.clamp(0, above.shape[1] - 1).long()
    sums = torch.zeros_like(above, dtype=torch.int64).scatter_add_(1, within, counts.long())
    steps = parents.diff(dim=1)
    filled_after_empty = (steps == 0) & (counts[:, :-1] == 0) & (counts[:, 1:] > 0)
    return (within != parents).any() | (sums != above).any() | (steps < 0).any() | filled_after_empty.any()


def _blocks(tensors: Tensors, split: Split) -> Faults:
    """Check the blocks of the middle, whose tokens were clustered separately.

    Blocks must cover the middle, and no cluster may have tokens of two blocks.
    """
    if "block_offsets" not in tensors:
        return {}
    offsets, order = tensors["block_offsets"], tensors["token_order"].long() - split.sinks
    ends = torch.tensor([0, split.middle], device=offsets.device)
    slots = torch.arange(split.middle, device=offsets.device)
    strayed = torch.searchsorted(offsets, order, right=True) != torch.searchsorted(offsets, slots, right=True)
    return {
        "block_offsets": (offsets[[0, -1]] != ends).any() | (offsets.diff() < 1).any() | strayed.any(),
        "block_clusters": _wrong_first_clusters(tensors),
    }


def _wrong_first_clusters(tensors: Tensors) -> torch.Tensor:
    """Whether the indices of the blocks' first clusters are invalid.

    These indices must ascend and be the same in all heads. A block's first cluster must start at the block's first
    token, and must not have the same parent as a cluster of the block before.
    """
    firsts = tensors["block_clusters"].long()
    count = tensors["level0.counts"].shape[1]
    begins = tensors["token_offsets"].gather(1, firsts.clamp(0, count))
    wrong = (firsts[:, 0] != 0).any() | (firsts[:, -1] != count).any() | (begins != tensors["block_offsets"]).any()
    wrong = wrong | (firsts.diff(dim=1) < 1).any() | (firsts != firsts[:1]).any()
    inner = firsts[:, 1:-1].clamp(1, max(1, count - 1))
    for level in range(_levels(tensors) - 1):
        parents = tensors[f"level{level}.parent"].long()
        own, before = (parents.gather(1, at.clamp(0, parents.shape[1] - 1)) for at in (inner, inner - 1))
        wrong = wrong | (own <= before).any() | (own != own[:1]).any()
        inner = own.clamp(min=1)
    return wrong


def _codes(tensors: Tensors) -> Faults:
    """Check that codes are below the number of centroids, and that each channel is in exactly one subspace."""
    faults = {}
    if "codes" in tensors:
        # Compared as int64, because a count of 256 centroids would overflow uint8.
        faults["codes"] = tensors["codes"].amax().long() >= tensors["codebooks"].shape[2]
    if "channels" in tensors:
        channels = tensors["channels"].flatten().sort().values
        faults["channels"] = (channels != torch.arange(len(channels), device=channels.device)).any()
    return faults


Letters = dict[str, int]
Shape = tuple[str, tuple[str, ...]]
"""A tensor's dtype and the names of its axes. The dtype `rows` means the index's dtype; an empty string allows any
dtype. An axis `X+1` has one entry more than the axis X."""

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
    context_rows.CENTROID_NAMES[name]: (dtype, tuple("C0" if axis == "N" else axis for axis in axes))
    for name, (dtype, axes) in _CONTEXT_INT8.items()
}
_LEVEL = re.compile(r"level(\d{1,2})\.(\w+)")


def in_this_form(manifest: Manifest) -> bool:
    """Whether an index stores keys and values in this version's format. Only the int8 format has changed.

    In the older int8 format, 64 tokens shared scales.
    """
    first = manifest.files[layer_file("context", min(manifest.attending))]
    return manifest.kv_storage is None or first.tensors.keys() >= _CONTEXT_INT8.keys()


def check_names(manifest: Manifest, folder: Path) -> None:
    """Raise ArtifactError if a manifest lacks the file of tokens or a file that one of its layers needs."""
    needed = [layer_file(one, layer) for one in ("context", "queries") for layer in manifest.attending]
    methods = [layer_file(one, layer) for one in manifest.methods for layer in manifest.indexed_layers]
    for name in (TOKENS, *needed, *methods):
        if name not in manifest.files:
            raise ArtifactError(f"the manifest of {folder} contradicts itself: {name} is not in it; {REBUILD}")


def check_layout(manifest: Manifest, folder: Path) -> None:
    """Raise ArtifactError if a manifest lacks files or contradicts itself, for example in shapes and dtypes of tensors.

    A method's tensors are checked only if this module lists their names. Methods of other packages may have others.
    """
    split, remedy = manifest.split, f"the manifest of {folder} contradicts itself: {{}}; {REBUILD}"
    if split.tokens != manifest.prompt.tokens:
        raise ArtifactError(remedy.format(f"its split has {split.tokens} tokens, its prompt {manifest.prompt.tokens}"))
    if not manifest.indexed_layers:
        raise ArtifactError(remedy.format("no layer is indexed"))
    if any(token.position >= split.tokens for token in manifest.canary):
        raise ArtifactError(remedy.format("a token of its canary is not in its prompt"))
    if len({record.path for record in manifest.files.values()}) < len(manifest.files):
        raise ArtifactError(remedy.format("two files have the same path"))
    stored = manifest.kv_storage
    if stored is not None and len(stored.errors) != len(manifest.attending):
        told = f"errors of {len(stored.errors)} layers for {len(manifest.attending)}"
        raise ArtifactError(remedy.format(f"its kv_storage has {told}"))
    try:
        _check(
            TOKENS,
            manifest.files[TOKENS].tensors,
            {"input_ids": ("int64", ("N",))},
            {"N": split.tokens},
            manifest.dtype,
        )
        indexed = set(manifest.indexed_layers)
        for layer, facts in manifest.attending.items():
            letters = {"N": split.tokens, "M": split.middle, "R": split.tail}
            _check_layer(manifest, layer, facts, letters, indexed=layer in indexed)
        _check_states(manifest)
    except KeyError as error:
        raise ArtifactError(remedy.format(f"{error.args[0]} is not in it")) from None
    except ValueError as error:
        raise ArtifactError(remedy.format(error)) from None


_STATE = re.compile(r"layer_(\d{3})\.(conv|recurrent)_\d{1,2}")


def _check_states(manifest: Manifest) -> None:
    """Raise ValueError if the files of recurrent and convolution states are invalid, or KeyError if one is missing.

    An index with states must have the states at three places: where the tail begins, before the last token, and after
    the last token. All files must have the same tensors. Each tensor must belong to a layer of the index, have a first
    axis of size 1, and be in the index's dtype or in float32. A layer that does not attend need not have a state.
    """
    if not (stored := manifest.states):
        return
    split, first = manifest.split, manifest.files[state_file(stored[0])].tensors
    for tokens in (split.sinks + split.middle, split.tokens - 1, split.tokens):
        _ = manifest.files[state_file(tokens)]
    if stored[0] < 1 or stored[-1] > split.tokens:
        raise ValueError(f"{state_file(stored[-1])} is beyond the end of the prompt")
    for name, record in first.items():
        known = _STATE.fullmatch(name)
        if known is None or int(known[1]) >= len(manifest.layers) or not record.shape or record.shape[0] != 1:
            raise ValueError(f"{name[:80]} of {state_file(stored[0])} is not a state of one of its layers")
        if record.dtype not in (manifest.dtype, "float32"):
            raise ValueError(f"{name[:80]} of {state_file(stored[0])} is in {record.dtype[:80]}")
    for tokens in stored[1:]:
        if manifest.files[state_file(tokens)].tensors != first:
            raise ValueError(f"{state_file(tokens)} has other tensors than {state_file(stored[0])}")


def _check_layer(manifest: Manifest, layer: int, facts: LayerFacts, letters: Letters, *, indexed: bool) -> None:
    context, queries = (layer_file(folder, layer) for folder in ("context", "queries"))
    rows = _CONTEXT if manifest.kv_storage is None else _CONTEXT_INT8
    _check(context, manifest.files[context].tensors, rows, letters, manifest.dtype)
    if more := sorted(manifest.files[context].tensors.keys() - rows.keys()):  # scales would change how rows are read
        raise ValueError(f"{context} has a tensor {more[0][:80]}, which keys and values in this storage do not have")
    wanted = _QUERIES if facts.attention_sinks else {"tail": _QUERIES["tail"]}
    _check(queries, manifest.files[queries].tensors, wanted, letters, manifest.dtype)
    rope = facts.rope
    if rope is not None and 2 * len(rope.frequencies) > letters["D"]:
        raise ValueError(f"layer {layer} rotates {len(rope.frequencies)} pairs of {letters['D']} channels")
    if letters["Hq"] % letters["Hk"]:
        raise ValueError(f"layer {layer} has {letters['Hq']} query heads on {letters['Hk']} KV heads")
    if not indexed:
        return
    samples = layer_file("samples", layer)
    if samples in manifest.files:
        _check(samples, manifest.files[samples].tensors, _SAMPLES, dict(letters), manifest.dtype)
    for method in manifest.methods:
        name = layer_file(method, layer)
        in_8_bits = manifest.kv_storage is not None
        _check_method(name, manifest.files[name].tensors, letters, manifest.dtype, in_8_bits=in_8_bits)


def form_fault(tensors: Any, split: Split, keys: torch.Tensor, dtype: str, what: str) -> str | None:
    """Return the first fault of the names, dtypes and shapes of a method's tensors of one layer; None if there is none.

    Tensors with such a fault cannot be stored, or `check_layout` would refuse their index. Int8 centroids are a fault,
    because centroids are rounded only when they are stored.

    Args:
        tensors: any object, because an indexer of another package returns it.
        keys: [Hk, M, D], the keys from which the tensors were built.
        dtype: the index's dtype, such as `bfloat16`.
        what: the name of the tensors in the message.
    """
    if not isinstance(tensors, dict) or not tensors:
        return f"{what} is {reprlib.repr(tensors)}, not a dict of tensors"
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            return f"{what} has a tensor named {name!r}, which is not a string"
        if not isinstance(tensor, torch.Tensor):
            return f"{name} of {what} is of the type {type(tensor).__name__}, not a tensor"
        if tensor.layout != torch.strided or tensor.dtype not in STORED_DTYPES:
            found = f"{tensor.dtype} in the layout {tensor.layout}".replace("torch.", "")
            return f"{name} of {what} is {found}; an index stores dense tensors of integers, floats or bools"
        if tensor.ndim > MOST_AXES:
            return f"{name} of {what} has {tensor.ndim} axes; an index stores at most {MOST_AXES}"
    Hk, _, D = keys.shape
    letters = {"Hk": Hk, "M": split.middle, "N": split.tokens, "D": D}
    try:
        _check_method(what, tensor_records(tensors), letters, dtype, in_8_bits=False)
    except ValueError as error:
        return str(error)
    return None


def _check_method(name: str, tensors: dict[str, TensorRecord], letters: Letters, rows: str, *, in_8_bits: bool) -> None:
    """Raise ValueError if a tensor of a method's file has a wrong shape or dtype.

    Also raise it if tensors of int8 centroids are missing, or if the index must not have them.

    `rows` is the index's dtype, and `in_8_bits` tells whether the index stores keys and values in int8.
    """
    _check(name, tensors, _known_shapes(name, tensors, in_8_bits=in_8_bits), own := dict(letters), rows)
    if own.get("m", 1) * own.get("d", own["D"]) != own["D"]:
        raise ValueError(f"{name} has {own['m']} parts of {own['d']} channels for {own['D']}")
    if own.get("L", 1) > own["M"]:
        raise ValueError(f"{name} has lists of {own['L']} tokens, and the middle {own['M']}")


def first_axis(folder: str, tensor: str) -> str | None:
    """Return the name of the first axis of a tensor in a folder's files, such as `Hk`; None for an unknown tensor."""
    known = {"context": _CONTEXT_INT8, "queries": _QUERIES, "samples": _SAMPLES}
    shape = known[folder].get(tensor) if folder in known else _CENTROIDS_INT8.get(tensor) or _of_method(tensor)
    return None if shape is None else shape[1][0]


def _known_shapes(name: str, tensors: dict[str, TensorRecord], *, in_8_bits: bool) -> dict[str, Shape]:
    """Return the shapes that tensors of a method's file must have.

    If the file has scales of int8 centroids, it must have all tensors of int8 centroids: those of keys and, if there
    are value centroids, those of values. `in_8_bits` is whether the index stores keys and values in int8.

    Raises:
        ValueError: the file has int8 centroids, but the index stores no keys and values in int8.
    """
    known = {tensor: shape for tensor in tensors if (shape := _of_method(tensor)) is not None}
    scales = sorted(tensors.keys() & context_rows.CENTROID_SCALES)
    if not scales:
        return known
    if not in_8_bits:
        raise ValueError(f"{name} has a tensor {scales[0]}, and the index stores nothing in 8 bits")
    has_values = any("value" in tensor for tensor in tensors.keys() & _CENTROIDS_INT8.keys())
    return known | {tensor: shape for tensor, shape in _CENTROIDS_INT8.items() if has_values or "value" not in tensor}


@cache
def _of_method(tensor: str) -> Shape | None:
    if level := _LEVEL.fullmatch(tensor):
        shape = _OF_LEVELS.get(level[2])
        return None if shape is None else (shape[0], tuple(axis.format(level=int(level[1])) for axis in shape[1]))
    return _OF_METHODS.get(tensor)


def _check(name: str, tensors: dict[str, TensorRecord], wanted: dict[str, Shape], letters: Letters, rows: str) -> None:
    """Raise ValueError for a tensor that is missing or has a wrong shape or dtype.

    The first tensor with an axis of a new name sets the size of that axis in `letters`. `rows` is the index's dtype.
    """
    for tensor, (dtype, axes) in wanted.items():
        if tensor not in tensors:
            raise ValueError(f"{tensor} is not in {name}")
        found, dtype = tensors[tensor], rows if dtype == "rows" else dtype
        if not _fits(found, dtype, axes, letters):
            shape = ", ".join(map(str, found.shape))
            sizes = ", ".join(f"{axis} = {letters[axis]}" for axis in axes if axis in letters)
            wanted_shape = f"{dtype or 'any dtype'} [{', '.join(axes)}]" + (sizes and f" with {sizes}")
            raise ValueError(f"{tensor} of {name} is {found.dtype} [{shape}], which does not fit {wanted_shape}")


def _fits(found: TensorRecord, dtype: str, axes: tuple[str, ...], letters: Letters) -> bool:
    if (dtype and found.dtype != dtype) or len(found.shape) != len(axes):
        return False
    for size, axis in zip(found.shape, axes, strict=True):
        count = size - 1 if axis.endswith("+1") else size
        if count < 1 or letters.setdefault(axis.removesuffix("+1"), count) != count:
            return False
    return True
