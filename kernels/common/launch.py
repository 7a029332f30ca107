"""How a kernel's work is spread over a GPU."""

from functools import lru_cache

import torch

FEWEST_ROWS = 32  # a program with fewer rows costs more than it saves
NO_GPU = 2  # SMs to plan for where kernels run in the interpreter


@lru_cache
def count_sms(device: torch.device) -> int:
    """Number of streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else NO_GPU


@lru_cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Options for programmatic dependent launch of a kernel that begins with `wait_for_previous_kernel`: from Hopper on
    it is launched while the kernel before it still runs."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@lru_cache
def num_splits(heads: int, rows: int, resident: int, grain: int = 20) -> int:
    """Number of programs that share one head's rows (split-K), chosen to fill the last wave of programs best.

    Args:
        rows: rows that one head reads.
        resident: programs that the GPU runs at the same time.
        grain: occupancy is compared in steps of 1 / `grain`; among equals the fewest splits win.
    """
    fewest = max(1, resident // heads)
    most = max(fewest, min(4 * fewest + 4, -(-rows // FEWEST_ROWS)))
    return max(range(fewest, most + 1), key=lambda number: (_full(heads * number, resident, grain), -number))


def _full(programs: int, resident: int, grain: int) -> float:
    """Share of the slots of all waves that the programs fill, rounded to 1 / `grain`."""
    return round(grain * programs / (-(-programs // resident) * resident)) / grain
