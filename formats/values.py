"""What numbers the tensors of an index may hold, so that no kernel that follows them leaves the tensors it is given.

Kernels check nothing: they take positions, offsets, parents and codes as they are. So whoever opens an index asks here,
on the device that will use its tensors; each tensor is read once or twice, and the answers are waited for together.
"""

import torch

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.manifest import REBUILD
from sparsekv.formats.schema import Split

Tensors = dict[str, torch.Tensor]
Faults = dict[str, torch.Tensor]
"""By tensor: a bool on its device, true where it cannot be followed."""


def not_finite(tensors: Tensors) -> str | None:
    """Name of the first tensor with a number that is not finite; None where all are."""
    return _first({name: ~_is_finite(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()})


def check_values(tensors: Tensors, split: Split, what: str) -> None:
    """Raise ArtifactError for tensors of a method's layer, of the shapes that `formats.layout` wants, that cannot be
    followed, or that hold numbers that are not finite.

    Args:
        tensors: on the device that will use them; positions are those of the prompt.
        what: names the layer.
    """
    faults = {name: ~_is_finite(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()}
    try:
        faults |= _positions(tensors, split) | _clusters(tensors, split.middle) | _blocks(tensors, split)
        wrong = _first(faults | _codes(tensors))
    except KeyError as error:
        raise ArtifactError(f"{error.args[0]} is not in {what}; {REBUILD}") from None
    if wrong is not None:
        raise ArtifactError(f"{wrong} in {what} holds numbers that no build of ours writes; {REBUILD}")


def _first(faults: Faults) -> str | None:
    if not faults:
        return None
    found = torch.stack(list(faults.values())).tolist()
    return next((name for name, is_wrong in zip(faults, found, strict=True) if is_wrong), None)


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    # The extremes tell: nan is passed on to them, and this is many times as fast as looking at each number.
    return torch.stack(torch.aminmax(tensor)).isfinite().all()


def _outside(tensor: torch.Tensor, first: int, end: int) -> torch.Tensor:
    least, most = torch.aminmax(tensor)
    return (least < first) | (most >= end)


def _positions(tensors: Tensors, split: Split) -> Faults:
    """Tokens of the middle, rising in a sample, and in an order each of them once."""
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
    """Levels numbered without a gap; counts of tokens that add up, and clusters one behind another."""
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
    """How many there are; KeyError for one that has not all that the others have."""
    numbers = {int(name.removeprefix("level").partition(".")[0]) for name in tensors if name.startswith("level")}
    for level in range(len(numbers)):
        for part in ("centroids", "counts", *(["parent"] if level + 1 < len(numbers) else [])):
            _ = tensors[f"level{level}.{part}"]
    return len(numbers)


def _wrong_parents(parents: torch.Tensor, counts: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """Not in the level above, whose counts are the sums of these; or falling, so that a parent's children are no
    neighbours; or with an empty child before one that is not."""
    within = parents.clamp(0, above.shape[1] - 1).long()
    sums = torch.zeros_like(above, dtype=torch.int64).scatter_add_(1, within, counts.long())
    steps = parents.diff(dim=1)
    filled_after_empty = (steps == 0) & (counts[:, :-1] == 0) & (counts[:, 1:] > 0)
    return (within != parents).any() | (sums != above).any() | (steps < 0).any() | filled_after_empty.any()


def _blocks(tensors: Tensors, split: Split) -> Faults:
    """Blocks that cover the middle, each with clusters of its own, which hold its tokens and no others."""
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
    """Of blocks: not the same in all heads, not rising, at another token than the block's, or sharing a parent with the
    block before."""
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
    """Codes that name a centroid, and channels each of which is in one part."""
    faults = {}
    if "codes" in tensors:
        # As a byte, 256 would compare as 0.
        faults["codes"] = tensors["codes"].amax().long() >= tensors["codebooks"].shape[2]
    if "channels" in tensors:
        channels = tensors["channels"].flatten().sort().values
        faults["channels"] = (channels != torch.arange(len(channels), device=channels.device)).any()
    return faults
