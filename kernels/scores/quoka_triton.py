"""QuoKA's choice of keys in Triton: directions of a chunk's outlying queries, ranks of all keys, and the best keys.

A key's rank is its highest score for a direction (`nearest_keys`), in steps of 2 ** -15. The pass over the keys counts
the keys of each rank. The counts are integers, and so they do not depend on the order of the additions. Every program
derives the rank of the last chosen key from these counts.
"""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.launch import (
    aligned,
    count_sms,
    dependent_launch,
    group_rows,
    num_splits,
    power_of_two,
    tile_rows,
    unit_stride,
)

HALF_BITS = 8  # half of the bits of a rank; keys are counted by rank, and by the upper half of the rank
RANKS = 4**HALF_BITS
ALWAYS = RANKS - 1  # rank of keys that are always chosen
PROGRAMS_PER_SM = 6
TILE_BYTES, WARPS, STAGES = 8192, 4, 1
QUERY_TILE_BYTES, QUERY_WARPS, QUERY_STAGES = 32_768, 8, 3
PARTS, CHUNK = 32, 2048  # programs per head that write rows, and keys that a program reads at a time
LARGEST = tl.constexpr(2**63 - 1)


@triton.jit
def _nearness_kernel(
    query, nearness, B, head_stride, row_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the cosine of each of a head's queries to the queries' mean, times the norm of the mean.

    The norm is the same for all queries of a head, and so it does not change their order.
    """
    common.wait_for_previous_kernel(EARLY)
    head = tl.program_id(0).to(tl.int64)
    t, d = tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    query, nearness = query + head * head_stride, nearness + head * B
    total = tl.zeros([TILE, BLOCK_D], tl.float32)
    for at in tl.range(0, B, TILE, num_stages=STAGES):
        inside = (at + t < B)[:, None] & (d < D)
        total += tl.load(query + (at + t)[:, None].to(tl.int64) * row_stride + d, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / B
    for at in tl.range(0, B, TILE, num_stages=STAGES):
        inside = (at + t < B)[:, None] & (d < D)
        q = tl.load(query + (at + t)[:, None].to(tl.int64) * row_stride + d, mask=inside, other=0.0).to(tl.float32)
        length = tl.maximum(tl.sqrt(tl.sum(q * q, 1)), 1e-12)
        tl.store(nearness + at + t, tl.sum(q * mean, 1) / length, mask=at + t < B)


@triton.jit
def _directions_kernel(
    query, nearness, directions, B, head_stride, row_stride, count,
    G: tl.constexpr, GROUP: tl.constexpr, BLOCK_B: tl.constexpr, SLOTS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Find the `count` queries with the lowest cosines in each query head, normalise them, and average over the group.

    There is one program per KV head.
    """
    common.wait_for_previous_kernel(EARLY)
    first = tl.program_id(0).to(tl.int64) * G
    g, b, slot, d = tl.arange(0, GROUP), tl.arange(0, BLOCK_B), tl.arange(0, SLOTS), tl.arange(0, BLOCK_D)
    known = (g < G)[:, None] & (b < B)
    near = tl.load(nearness + (first + g[:, None]) * B + b, mask=known, other=0.0)
    # The cosines become integers of the same order. The low bits hold the query's index, so that no two are equal.
    bits = near.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    packed = tl.where(known, (ordered << 32) | b.to(tl.int64), LARGEST)
    places = tl.zeros([GROUP, SLOTS], tl.int32)
    for at in range(count):
        least = tl.min(packed, 1)[:, None]
        places = tl.where(slot == at, (least & 0x7FFFFFFF).to(tl.int32), places)
        packed = tl.where(packed == least, LARGEST, packed)
    total = tl.zeros([SLOTS, BLOCK_D], tl.float32)
    inside = (slot < count)[:, None] & (d < D)
    for one in tl.static_range(G):
        row = tl.sum(tl.where(g[:, None] == one, places, 0), 0)
        at_row = query + (first + one) * head_stride + row[:, None] * row_stride + d
        q = tl.load(at_row, mask=inside, other=0.0).to(tl.float32)
        total += q / tl.maximum(tl.sqrt(tl.sum(q * q, 1)), 1e-12)[:, None]
    place = (tl.program_id(0).to(tl.int64) * count + slot[:, None]) * D + d
    tl.store(directions + place, total / G, mask=inside)


def far_directions_triton(query, count):
    """Run `far_directions` on a GPU, for `count` below the number of queries."""
    Hk, G, B, D = query.shape
    heads = unit_stride(query.flatten(0, 1))
    nearness = torch.empty(Hk * G, B, device=query.device)
    found = torch.empty(Hk, count, D, device=query.device)
    _nearness_kernel[(Hk * G,)](
        heads, nearness, B, *heads.stride()[:2], D=D, BLOCK_D=power_of_two(D),
        TILE=tile_rows(D, query.dtype, QUERY_TILE_BYTES), STAGES=QUERY_STAGES, num_warps=QUERY_WARPS,
        **dependent_launch(query.device),
    )  # fmt: skip
    _directions_kernel[(Hk,)](
        heads, nearness, found, B, *heads.stride()[:2], count, G=G, GROUP=power_of_two(G), BLOCK_B=power_of_two(B),
        SLOTS=power_of_two(count), D=D, BLOCK_D=power_of_two(D),
        num_warps=min(16, max(4, power_of_two(G) * power_of_two(B) // 1024)), **dependent_launch(query.device),
    )  # fmt: skip
    return found


@triton.jit
def _ranks_kernel(
    some, keys, ranks, counts, T, head_stride, row_stride, first_kept, last_kept, Q, rank_stride,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    HALF_BITS: tl.constexpr, ALWAYS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rank a program's share of a head's keys, and count the keys of each rank.

    Keys from `first_kept` up to, but not including, `last_kept` are ranked by their highest score for any direction. A
    score is the product of key and direction, divided by the key's norm; it is from -1 to 1. Other keys get rank
    `ALWAYS`. Ranks are stored minus 2 ** 15, as int16.
    """
    common.wait_for_previous_kernel(EARLY)
    part, parts, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    r, d, t = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    q = tl.load(some + (head * Q + r[:, None]) * D + d, mask=(r < Q)[:, None] & (d < D), other=0.0)
    q = q.to(keys.dtype.element_ty)
    keys, ranks = keys + head * head_stride, ranks + head * rank_stride
    coarse = counts + head * ((ALWAYS + 1) + (1 << HALF_BITS))
    fine = coarse + (1 << HALF_BITS)
    first, stop = common.share(part, parts, rank_stride // 16)
    first, stop = tl.multiple_of(first * 16, 16), tl.multiple_of(stop * 16, 16)
    for at in tl.range(first, stop, TILE, num_stages=STAGES):
        c = at + t
        inside = (c < stop) & (c < T)
        row = c.to(tl.int64) * row_stride
        k = tl.load(keys + row[:, None] + d, mask=inside[:, None] & (d < D), other=0.0)
        highest = tl.max(tl.where((r < Q)[:, None], common.dot(q, tl.trans(k)), -float("inf")), 0)
        wide = k.to(tl.float32)
        score = highest / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), 1e-12)
        scaled = (score + 1.0) * 32768.0
        # NaN gets the lowest rank, because it must not be cast to an integer.
        rank = tl.minimum(tl.where(scaled > 0.0, scaled, 0.0), ALWAYS - 1.0).to(tl.int32)
        rank = tl.where((c < first_kept) | (c >= last_kept), ALWAYS, rank)
        tl.store(ranks + c, (rank - 32768).to(tl.int16), mask=inside)
        tl.atomic_add(coarse + (rank >> HALF_BITS), 1, mask=inside, sem="relaxed")
        tl.atomic_add(fine + rank, 1, mask=inside, sem="relaxed")


@triton.jit
def _last_reached(counts, wanted, HALF_BITS: tl.constexpr):
    """Find the largest rank that at least `wanted` keys reach; also return the number of keys above it."""
    rank = tl.arange(0, 1 << HALF_BITS)
    number = tl.load(counts + rank)
    reach = tl.cumsum(number, 0, reverse=True)
    last = tl.sum((reach >= wanted).to(tl.int32), 0) - 1
    return last, tl.sum(tl.where(rank > last, number, 0), 0)


@triton.jit(do_not_specialize=["count"])
def _rows_kernel(
    ranks, counts, rows, T, rank_stride, count, part_rows, CHUNK: tl.constexpr, HALF_BITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write the indices of the chosen keys in a program's share, after those of earlier programs' shares."""
    common.wait_for_previous_kernel(EARLY)
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    coarse = counts + head * ((1 << 2 * HALF_BITS) + (1 << HALF_BITS))
    fine = coarse + (1 << HALF_BITS)
    upper, above_upper = _last_reached(coarse, count, HALF_BITS)
    lower, above_lower = _last_reached(fine + (upper << HALF_BITS), count - above_upper, HALF_BITS)
    last = (upper << HALF_BITS) + lower - 32768
    room = count - above_upper - above_lower
    ranks, rows = ranks + head * rank_stride, rows + head * count
    t = tl.arange(0, CHUNK)
    above, equal = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    own = part * part_rows
    # Elements past the end are masked by `inside`, not by a low rank as `other`. Triton 3.6 writes a negative int16
    # `other` only to every second element.
    for at in range(0, own, CHUNK):
        inside = at + t < T
        rank = tl.load(ranks + at + t, mask=inside, other=0).to(tl.int32)
        above += ((rank > last) & inside).to(tl.int32)
        equal += ((rank == last) & inside).to(tl.int32)
    above_before, equal_before = tl.sum(above, 0), tl.sum(equal, 0)
    for at in range(own, tl.minimum(own + part_rows, T), CHUNK):
        c = at + t
        inside = c < T
        rank = tl.load(ranks + c, mask=inside, other=0).to(tl.int32)
        is_above, is_equal = ((rank > last) & inside).to(tl.int32), ((rank == last) & inside).to(tl.int32)
        # Two running sums, of at most CHUNK each, are packed in one integer.
        sums = tl.cumsum(is_above + (is_equal << 16), 0)
        above_ends, equal_ends = above_before + (sums & 0xFFFF), equal_before + (sums >> 16)
        chosen = (is_above > 0) | ((is_equal > 0) & (equal_ends <= room))
        place = above_ends + tl.minimum(equal_ends, room) - 1
        tl.store(rows + place, c.to(tl.int64), mask=chosen)
        above_before += tl.sum(is_above, 0)
        equal_before += tl.sum(is_equal, 0)


def nearest_keys_triton(some, keys, count, first=0, last=0):
    """Run `nearest_keys` on a GPU; views of keys with a contiguous last axis are read in place, others are copied."""
    (H, T, D), Q, keys = keys.shape, some.shape[1], unit_stride(keys)
    parts = num_splits(H, T, PROGRAMS_PER_SM * count_sms(keys.device))
    stride = aligned(T)
    ranks = torch.empty(H, stride, dtype=torch.int16, device=keys.device)
    counts = torch.zeros(H, RANKS + 2**HALF_BITS, dtype=torch.int32, device=keys.device)
    rows = torch.empty(H, count, dtype=torch.int64, device=keys.device)
    _ranks_kernel[(parts, H)](
        some.contiguous(), keys, ranks, counts, T, *keys.stride()[:2], first, T - last, Q, stride,
        ROWS=group_rows(Q), D=D, BLOCK_D=power_of_two(D), TILE=tile_rows(D, keys.dtype, TILE_BYTES), STAGES=STAGES,
        HALF_BITS=HALF_BITS, ALWAYS=ALWAYS, num_warps=WARPS, **dependent_launch(keys.device),
    )  # fmt: skip
    part_rows = triton.cdiv(triton.cdiv(T, PARTS), CHUNK) * CHUNK
    _rows_kernel[(triton.cdiv(T, part_rows), H)](
        ranks, counts, rows, T, stride, count, part_rows, CHUNK=CHUNK, HALF_BITS=HALF_BITS, num_warps=8,
        **dependent_launch(keys.device),
    )  # fmt: skip
    return rows
