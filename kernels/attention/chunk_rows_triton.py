"""`chunk_rows` in Triton: one launch copies keys, values and queries."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common.launch import dependent_launch, power_of_two, tile_rows, unit_stride
from sparsekv.kernels.common.tiles_triton import wait_for_previous_kernel

TILE_BYTES, WARPS = 8192, 4


@triton.jit(do_not_specialize=["known", "slots", "before", "heads"])
def _chunk_rows_kernel(
    query, keys, values, chosen, of_query, joined, known, slots, before, heads,
    query_head, query_row, key_head, key_row, value_head, value_row, joined_head, joined_values,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write one tile of slots. A slot is a row of the result.

    The first `known` slots are the chosen rows, and the other slots are the chunk's rows.

    Program axis 1 runs over `heads` KV heads, whose keys and values are copied, and then, if queries are padded, over
    the query heads. The first `known` slots of a query head are left unwritten.
    """
    wait_for_previous_kernel(EARLY)
    head, d = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_D)
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (slot < slots)[:, None] & (d < D)
    place = slot[:, None] * D + d
    if head < heads:
        row = tl.load(chosen + head * known + slot, mask=slot < known, other=0)
        row = tl.where(slot < known, row, before + slot - known)[:, None]
        k = tl.load(keys + head * key_head + row * key_row + d, mask=inside)
        v = tl.load(values + head * value_head + row * value_row + d, mask=inside)
        tl.store(joined + head * joined_head + place, k, mask=inside)
        tl.store(joined + joined_values + head * joined_head + place, v, mask=inside)
    else:
        head -= heads
        of_chunk = inside & (slot >= known)[:, None]
        row = (slot - known).to(tl.int64)[:, None]
        q = tl.load(query + head * query_head + row * query_row + d, mask=of_chunk)
        tl.store(of_query + head * joined_head + place, q, mask=of_chunk)


def chunk_rows_triton(query, keys, values, chosen, *, padded=False):
    """Run `chunk_rows` on a GPU; views with a contiguous last axis are read in place, others are copied first."""
    (H, T, D), (Hq, B, _), K = keys.shape, query.shape, chosen.shape[1]
    query, keys, values = (unit_stride(rows) for rows in (query, keys, values))
    slots, tile = K + B, tile_rows(D, keys.dtype, TILE_BYTES)
    joined = torch.empty(2, H, slots, D, dtype=keys.dtype, device=keys.device)
    of_query = torch.empty(Hq, slots, D, dtype=query.dtype, device=keys.device) if padded else query
    _chunk_rows_kernel[(triton.cdiv(slots, tile), H + Hq if padded else H)](
        query, keys, values, chosen.contiguous(), of_query, joined, K, slots, T - B, H,
        *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2], slots * D, H * slots * D,
        D=D, BLOCK_D=power_of_two(D), TILE=tile, num_warps=WARPS, **dependent_launch(keys.device),
    )  # fmt: skip
    of_keys, of_values = joined.unbind()
    return of_query, of_keys, of_values
