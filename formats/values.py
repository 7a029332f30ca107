"""Checks the numbers in an index's tensors, so that no kernel that uses them accesses memory out of bounds.

Kernels do not check positions, offsets, parents and codes. So they are checked here when an index is opened, on the
device that will use its tensors; each tensor is read once or twice, with one synchronisation for all checks.
"""

import torch

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.int8_centroids import NAMES, numbers_of
from sparsekv.formats.int8_rows import bounds
from sparsekv.formats.manifest import REBUILD
from sparsekv.formats.schema import Split

Tensors = dict[str, torch.Tensor]
IN_EVERY = {"value_centroids", "lookup_centroids"}
"""What levels of clusters have all, or none."""
Faults = dict[str, torch.Tensor]
"""By tensor name: a bool on the tensor's device, True if it holds invalid numbers."""


def not_finite(tensors: Tensors) -> str | None:
    """Name of the first tensor with a number that is not finite; None if all are finite."""
    return _first({name: ~_is_finite(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()})


def check_values(tensors: Tensors, split: Split, what: str) -> None:
    """Raise ArtifactError if a method's tensors of one layer hold indices out of bounds, inconsistent structure, or
    numbers that are not finite.

    Args:
        tensors: of the shapes that `formats.layout` requires, on the device that will use them; positions are those in
            the prompt.
        what: the layer's name in error messages.
    """
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    faults = {name: ~_is_finite(tensor) for name, tensor in (floating | _scales(tensors)).items()}
    try:
        faults |= _positions(tensors, split) | _clusters(tensors, split.middle) | _blocks(tensors, split)
        wrong = _first(faults | _codes(tensors))
    except KeyError as error:
        raise ArtifactError(f"{error.args[0]} is not in {what}; {REBUILD}") from None
    except ValueError:
        raise ArtifactError(f"{what} has a tensor whose name names no level; {REBUILD}") from None
    if wrong is not None:
        raise ArtifactError(f"{wrong} in {what} holds numbers that no build of ours writes; {REBUILD}")


def _scales(tensors: Tensors) -> Tensors:
    """What must be finite of centroids in 8 bits, by the names of a method's tensors."""
    return {NAMES[name]: largest for name, largest in bounds(numbers_of(tensors) or {}).items()}


def _first(faults: Faults) -> str | None:
    if not faults:
        return None
    found = torch.stack(list(faults.values())).tolist()
    return next((name for name, is_wrong in zip(faults, found, strict=True) if is_wrong), None)


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel() or tensor.dtype.itemsize == 1:  # torch finds no extremes of these
        return tensor.float().isfinite().all()
    # The extremes suffice, since NaN propagates to them, and are many times as fast as testing each number.
    return torch.stack(torch.aminmax(tensor)).isfinite().all()


def _outside(tensor: torch.Tensor, first: int, end: int) -> torch.Tensor:
    if not tensor.numel():
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    least, most = torch.aminmax(tensor)
    return (least < first) | (most >= end)


def _positions(tensors: Tensors, split: Split) -> Faults:
    """Positions must be in the middle; those of sampled queries ascend; `token_order` has each token once."""
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
    """Levels must be numbered without gaps, counts sum to the middle's tokens, and offsets match the counts."""
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
    """Number of levels; KeyError if one lacks a tensor, or what another one has."""
    of_levels = [name.removeprefix("level").split(".") for name in tensors if name.startswith("level")]
    numbers, parts = {int(number) for number, _ in of_levels}, {part for _, part in of_levels}
    for level in range(len(numbers)):
        for part in ("centroids", "counts", *(["parent"] if level + 1 < len(numbers) else []), *(parts & IN_EVERY)):
            _ = tensors[f"level{level}.{part}"]
    return len(numbers)


def _wrong_parents(parents: torch.Tensor, counts: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """Whether parents are wrong: out of bounds, with counts that do not sum to those above, descending (so that a
    parent's children are not contiguous), or with an empty child before one that is not."""
    within = parents.clamp(0, above.shape[1] - 1).long()
    sums = torch.zeros_like(above, dtype=torch.int64).scatter_add_(1, within, counts.long())
    steps = parents.diff(dim=1)
    filled_after_empty = (steps == 0) & (counts[:, :-1] == 0) & (counts[:, 1:] > 0)
    return (within != parents).any() | (sums != above).any() | (steps < 0).any() | filled_after_empty.any()


def _blocks(tensors: Tensors, split: Split) -> Faults:
    """Blocks must cover the middle, and each must have its own clusters, which contain its tokens and no others."""
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
    """Whether the first clusters of blocks are wrong: not the same in all heads, not ascending, not starting at the
    block's first token, or with the same parent as the block before."""
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
    """Codes must be below the number of centroids, and each channel must be in exactly one subspace."""
    faults = {}
    if "codes" in tensors:
        # Compared as int64: 256 centroids would be 0 as uint8.
        faults["codes"] = tensors["codes"].amax().long() >= tensors["codebooks"].shape[2]
    if "channels" in tensors:
        channels = tensors["channels"].flatten().sort().values
        faults["channels"] = (channels != torch.arange(len(channels), device=channels.device)).any()
    return faults
