"""Meet the other ranks of a command, if there are any, and refuse what they cannot do together."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparsekv.formats.errors import UsageError
from sparsekv.formats.ranks.place import own_place

if TYPE_CHECKING:  # torch.distributed is for ranks alone
    from sparsekv.formats.ranks.ranks import Ranks


def join_ranks(device: str) -> "Ranks | None":
    """This process among the others; None for one process.

    Args:
        device: as `--device` names it.

    Raises:
        UsageError: it names other devices than ranks take.
    """
    place = own_place()
    if place is None:
        return None
    from sparsekv.formats.ranks.ranks import join

    ranks = join(place)
    if device not in ("auto", ranks.device.type):
        hide = "; to use CPUs, hide the GPUs: CUDA_VISIBLE_DEVICES=" if ranks.device.type == "cuda" else ""
        raise UsageError(f"--device {device}: each rank takes the device of its number; leave it out{hide}")
    return ranks


def refuse_with_ranks(given: Mapping[str, object]) -> None:
    """Raise UsageError for the first of some options that is given: it is for one process."""
    for option, value in given.items():
        if value:
            raise UsageError(f"with several ranks there is no {option}; leave it out, or --gpus")
