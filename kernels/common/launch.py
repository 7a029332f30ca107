"""Launch parameters: how a kernel's work is split over a GPU, and the shapes and layouts of its tiles."""

from functools import lru_cache

import torch

FEWEST_ROWS = 32  # to fill the last wave, heads are split only down to this many rows a program
NO_GPU = 2  # number of SMs assumed where kernels run in the interpreter


@lru_cache
def count_sms(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a GPU, or `NO_GPU` on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else NO_GPU


@lru_cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return a kernel's launch options, with programmatic dependent launch on a GPU from Hopper on.

    With this option a kernel is launched while the previous kernel still runs. Therefore it must call
    `wait_for_previous_kernel`, or `only_wait` and `let_next_launch`, before it reads what an earlier kernel writes.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether a device is a GPU of the generation Hopper, such as an H100 or H200."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache
def num_splits(heads: int, rows: int, resident: int, grain: int = 20) -> int:
    """Choose the number of programs that share one head's rows (split-K), so that the last wave is as full as possible.

    Args:
        heads: number of heads.
        rows: number of rows that one head reads.
        resident: number of programs that the GPU runs at the same time.
        grain: occupancy is compared in steps of 1 / `grain`; among equal steps the fewest splits win.
    """
    fewest = max(1, resident // heads)
    most = max(fewest, min(4 * fewest + 4, -(-rows // FEWEST_ROWS)))
    return max(range(fewest, most + 1), key=lambda number: (_full(heads * number, resident, grain), -number))


def _full(programs: int, resident: int, grain: int) -> float:
    """Compute the share of program slots that are filled over all waves, rounded to 1 / `grain`."""
    return round(grain * programs / (-(-programs // resident) * resident)) / grain


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def group_rows(group: int) -> int:
    """Return the number of rows of a tile that holds a group of query heads; tensor cores need at least 16."""
    return max(16, power_of_two(group))


def tile_rows(head_dim: int, dtype: torch.dtype, size: int) -> int:
    """Return the number of rows of a tile of `size` bytes, clamped to the range from 16 to 128."""
    return min(max(size // (power_of_two(head_dim) * dtype.itemsize), 16), 128)


ALIGNED = 16  # if starts and lengths of rows are multiples of this, four elements can be read at a time


def aligned(size: int) -> int:
    """Round `size` up to a multiple of `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED


def have_equal_strides(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether keys and values have equal strides along all axes longer than 1."""
    strides = zip(keys.stride(), values.stride(), keys.shape, strict=True)
    return all(of_keys == of_values or size == 1 for of_keys, of_values, size in strides)


def unit_stride(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [..., D] with contiguous channels; copy them if needed."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def side_by_side(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [H, C] or [H, C, D] that are contiguous within each head; copy them if needed.

    The stride between heads is arbitrary.
    """
    return rows if rows.stride()[1:] == (*rows.shape[2:], 1) else rows.contiguous()
