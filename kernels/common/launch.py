"""How a kernel's work is spread over a GPU, and the shapes and layouts of its tiles."""

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


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def group_rows(group: int) -> int:
    """Rows of a tile that holds a group of query heads: tensor cores need at least 16."""
    return max(16, power_of_two(group))


def tile_rows(head_dim: int, dtype: torch.dtype, size: int) -> int:
    """Rows of a tile of `size` bytes, limited to 16 to 128."""
    return min(max(size // (power_of_two(head_dim) * dtype.itemsize), 16), 128)


ALIGNED = 16  # elements: rows whose start and length are multiples of this can be read four elements at a time


def aligned(size: int) -> int:
    """The next multiple of `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED


def unit_stride(rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., D] with contiguous channels; copied if they are not."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def side_by_side(rows: torch.Tensor) -> torch.Tensor:
    """Rows [H, C] or [H, C, D] with contiguous heads, which need not be adjacent; copied if they are not."""
    return rows if rows.stride()[1:] == (*rows.shape[2:], 1) else rows.contiguous()
