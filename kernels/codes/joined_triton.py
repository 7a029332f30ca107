"""`join_chosen` in Triton: keys are flagged, flags counted tile by tile, and listed."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.codes.types import JoinedKeys
from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.common.tiles_triton import aligned, power_of_two, wait_for_previous_kernel
from sparsekv.kernels.tables.types import KeyGroups

FLAGGED, TILE = 1024, 1024  # keys of a program


@triton.jit(do_not_specialize=["number"])
def _flag_kernel(chosen, flags, number, padded, FLAGGED: tl.constexpr, EARLY: tl.constexpr):
    """Set the flag of each key that is chosen; those that are chosen twice are set twice."""
    head, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * FLAGGED + tl.arange(0, FLAGGED)
    wait_for_previous_kernel(EARLY)
    key = tl.load(chosen + head * number + at, mask=at < number, other=0)
    tl.store(flags + head * padded + key, tl.full([FLAGGED], 1, tl.int8), mask=at < number)


@triton.jit
def _count_flags_kernel(flags, counts, TILE: tl.constexpr, EARLY: tl.constexpr):
    """How many keys of a tile have a flag."""
    tile = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    wait_for_previous_kernel(EARLY)
    flagged = tl.load(flags + tile * TILE + tl.arange(0, TILE)).to(tl.int32)
    tl.store(counts + tile, tl.sum(flagged, 0))


@triton.jit(do_not_specialize=["keys", "capacity"])
def _list_flags_kernel(
    flags, counts, labels, taken, rows, used, keys, capacity, labels_stride, rows_stride, groups, TILE: tl.constexpr,
    TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """List the keys of a tile that have a flag, after those of the tiles before it, and count their groups."""
    tile, tiles, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    key, every = tile * TILE + tl.arange(0, TILE), tl.arange(0, TILES)
    group = tl.load(labels + head * labels_stride + key, mask=key < keys, other=0).to(tl.int32)
    wait_for_previous_kernel(EARLY)
    flagged = tl.load(flags + (head * tiles + tile) * TILE + tl.arange(0, TILE)).to(tl.int32)
    of_tiles = tl.load(counts + head * tiles + every, mask=every < tiles, other=0)
    place = tl.sum(tl.where(every < tile, of_tiles, 0), 0) + tl.cumsum(flagged, 0) - 1
    tl.store(rows + head * rows_stride + place, key, mask=(flagged > 0) & (place < capacity))
    tl.atomic_add(taken + head * groups + group, 1, mask=flagged > 0, sem="relaxed")
    if tile == 0:
        tl.store(used + head, tl.sum(of_tiles, 0))


def join_chosen_triton(chosen: torch.Tensor, capacity: int, groups: KeyGroups) -> JoinedKeys:
    """`join_chosen` on a GPU."""
    (H, keys), number, device = groups.labels.shape, chosen[0].numel(), chosen.device
    tiles, early = triton.cdiv(keys, TILE), dependent_launch(device)
    flags = torch.zeros(H, tiles * TILE, dtype=torch.int8, device=device)
    counts = torch.empty(H, tiles, dtype=torch.int32, device=device)
    rows = torch.empty(H, aligned(capacity), dtype=torch.int32, device=device)
    used = torch.empty(H, dtype=torch.int32, device=device)
    _flag_kernel[(triton.cdiv(number, FLAGGED), H)](
        chosen.contiguous(), flags, number, tiles * TILE, FLAGGED=FLAGGED, num_warps=4, **early
    )
    _count_flags_kernel[(tiles, H)](flags, counts, TILE=TILE, num_warps=2, **early)
    _list_flags_kernel[(tiles, H)](
        flags, counts, groups.labels, groups.taken, rows, used, keys, capacity, groups.labels.stride(0),
        rows.stride(0), groups.taken.shape[1], TILE=TILE, TILES=power_of_two(tiles), num_warps=4, **early,
    )  # fmt: skip
    return JoinedKeys(rows[:, :capacity], used)
