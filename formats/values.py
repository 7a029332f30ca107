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
        faults |= _positions(tensors, split) | _clusters(tensors, split.middle) | _blocks(tensors, split.middle)
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
    """Tokens of the middle, and in an order each of them once."""
    first, end = split.sinks, split.sinks + split.middle
    listed = [name for name in tensors if name in ("table_tokens", "positions")]
    faults = {name: _outside(tensors[name], first, end) for name in listed}
    if "token_order" in tensors:
        order = tensors["token_order"].long() - first
        seen = torch.zeros(order.shape, dtype=torch.bool, device=order.device)
        seen.scatter_(1, order.clamp(0, split.middle - 1), True)
        faults["token_order"] = _outside(order, 0, split.middle) | ~seen.all()
    return faults


def _clusters(tensors: Tensors, middle: int) -> Faults:
    """Counts of tokens that add up, clusters one behind another, parents that are in the level above."""
    faults = {}
    for name, counts in tensors.items():
        if name.endswith(".counts"):
            faults[name] = _outside(counts, 0, middle + 1) | (counts.sum(1) != middle).any()
    for name, parents in tensors.items():
        if name.endswith(".parent"):
            level = int(name.removeprefix("level").removesuffix(".parent"))
            own, above = tensors[f"level{level}.counts"], tensors[f"level{level + 1}.counts"]
            within = parents.clamp(0, above.shape[1] - 1).long()
            sums = torch.zeros_like(above, dtype=torch.int64).scatter_add_(1, within, own.long())
            faults[name] = (within != parents).any() | (sums != above).any() | (parents.diff(dim=1) < 0).any()
    if "token_offsets" in tensors:
        offsets, counts = tensors["token_offsets"], tensors["level0.counts"]
        faults["token_offsets"] = (offsets[:, :1] != 0).any() | (offsets.diff(dim=1) != counts).any()
    return faults


def _blocks(tensors: Tensors, middle: int) -> Faults:
    """Blocks that cover the middle, and the clusters of each."""
    if "block_offsets" not in tensors:
        return {}
    offsets, clusters = tensors["block_offsets"], tensors["block_clusters"]
    ends = torch.tensor([0, middle], device=offsets.device)
    count = tensors["level0.counts"].shape[1]
    return {
        "block_offsets": (offsets[[0, -1]] != ends).any() | (offsets.diff() < 1).any(),
        "block_clusters": (clusters[:, 0] != 0).any()
        | (clusters[:, -1] != count).any()
        | (clusters.diff(dim=1) < 1).any()
        | (clusters != clusters[:1]).any(),
    }


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
