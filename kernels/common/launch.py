"""How a kernel's work is spread over a GPU."""

from functools import lru_cache

import torch

FEWEST_ROWS = 32  # that a program is worth having for
NO_GPU = 2  # "multiprocessors" where kernels run in the interpreter


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else NO_GPU


@lru_cache
def following(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that begins with `start`: from Hopper on it is launched while the kernel before it
    still runs, and waits for that on the GPU."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@lru_cache
def programs_per_head(heads: int, rows: int, at_once: int, grain: int = 20) -> int:
    """How many programs share a head's rows, so that the last wave of all programs is as full as can be.

    Args:
        rows: that a head reads.
        at_once: programs that run at the same time.
        grain: two waves that are as full as each other to so many parts are alike, and the shorter one is taken.
    """
    fewest = max(1, at_once // heads)
    most = max(fewest, min(4 * fewest + 4, -(-rows // FEWEST_ROWS)))
    return max(range(fewest, most + 1), key=lambda number: (_full(heads * number, at_once, grain), -number))


def _full(programs: int, at_once: int, grain: int) -> float:
    """The share of the places that so many programs fill, in the waves that they run in; to one in `grain`."""
    return round(grain * programs / (-(-programs // at_once) * at_once)) / grain
