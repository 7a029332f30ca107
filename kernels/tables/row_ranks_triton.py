"""`rank_rows` in Triton: logits of scattered rows and their sums over all SMs, then ranks and counts."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common.launch import count_sms, dependent_launch, num_splits
from sparsekv.kernels.common.tiles_triton import (
    LOG2_E,
    capped,
    dot,
    group_rows,
    power_of_two,
    share,
    tile_rows,
    wait_for_previous_kernel,
)
from sparsekv.kernels.tables.list_codes import TILE_TOKENS, TILE_WORDS
from sparsekv.kernels.tables.packed_triton import exp2
from sparsekv.kernels.tables.types import BINS, FRACTION_BITS, RANKS, TokenRanks, lowest_rank

PROGRAMS_PER_SM = 4
TILE_BYTES, STAGES, WARPS, RANK_WARPS = 16_384, 3, 4, 8


@triton.jit(do_not_specialize=["slots"])
def _row_logits_kernel(
    query, keys, rows, logits, peaks, totals, slots, stride, head_stride, row_stride, softmax_scale, softcap,
    CAPPED: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Logits / ln 2 of a program's share of a head's rows, their peak, and the sum of their exponentials."""
    wait_for_previous_kernel(EARLY)
    part, parts, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    of_group = g < G
    q = tl.load(query + (head * G + g[:, None]) * D + d, mask=of_group[:, None] & (d < D), other=0.0)
    peak = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    first, stop = share(part, parts, slots)
    for at in tl.range(first, stop, TILE, num_stages=STAGES):
        inside = at + t < stop
        row = tl.load(rows + head * slots + at + t, mask=inside, other=0)
        place = keys + head * head_stride + row[:, None] * row_stride + d
        # An index may hold keys in another precision than the model's queries.
        k = tl.load(place, mask=inside[:, None] & (d < D), other=0.0).to(q.dtype)
        some = capped(dot(q, tl.trans(k)) * softmax_scale, softcap, CAPPED) * LOG2_E
        tl.store(logits + (head * G + g[:, None]) * stride + at + t, some, mask=of_group[:, None] & inside)
        some = tl.where(inside, some, -float("inf"))
        highest = tl.maximum(peak, tl.max(some, 1))
        total = total * tl.exp2(peak - highest) + tl.sum(tl.exp2(some - highest[:, None]), 1)
        peak = highest
    place = (head * G + g) * parts + part
    tl.store(peaks + place, peak, mask=of_group)
    tl.store(totals + place, total, mask=of_group)


@triton.jit(do_not_specialize=["slots", "parts", "least"])
def _row_rank_kernel(
    logits, peaks, totals, estimated, ranks, coarse, logsumexps, slots, stride, parts, least, G: tl.constexpr,
    SLOTS: tl.constexpr, PARTS: tl.constexpr, FRACTION_BITS: tl.constexpr, RANKS: tl.constexpr, BINS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Ranks of a tile of slots in the layout of `TokenRanks`, and their counts in bins of 16 ranks."""
    wait_for_previous_kernel(EARLY)
    tile, tiles, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    i, s = tl.arange(0, SLOTS), tl.arange(0, PARTS)
    slot = tile * SLOTS + i
    score = tl.zeros([SLOTS], tl.float32)
    for g in tl.static_range(G):
        place = (head * G + g) * parts + s
        part_peaks = tl.load(peaks + place, mask=s < parts, other=-float("inf"))
        part_totals = tl.load(totals + place, mask=s < parts, other=0.0)
        peak = tl.max(part_peaks, 0)
        logsumexp = peak + tl.log2(tl.sum(part_totals * tl.exp2(part_peaks - peak), 0))
        logsumexp = tl.maximum(logsumexp, tl.load(estimated + head * G + g) * LOG2_E)
        if tile == 0:
            tl.store(logsumexps + head * G + g, logsumexp / LOG2_E)
        at = logits + (head * G + g) * stride + slot
        score += exp2(tl.load(at, mask=slot < slots, other=-float("inf")) - logsumexp)
    rank = ((score / G).to(tl.int32, bitcast=True) >> (23 - FRACTION_BITS)) - least
    rank = tl.minimum(tl.maximum(rank, 0), RANKS - 1)
    by_byte = tl.reshape(rank << (8 * (i // 8 % 4)), [SLOTS // 32, 4, 8])
    words = tl.reshape(tl.sum(by_byte, 1), [SLOTS // 4])
    w = tl.arange(0, SLOTS // 4)
    row, word = w % 2, w // 2
    tl.store(ranks + ((head * tiles + tile) * 2 + row) * (SLOTS // 8) + word, words)
    tl.store(coarse + (head * tiles + tile) * BINS + tl.arange(0, BINS), tl.histogram(rank // BINS, BINS))


def rank_rows_triton(
    query: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor,
    logsumexp: torch.Tensor,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> TokenRanks:
    """`rank_rows` on a GPU; reads the rows' keys once."""
    (H, G, D), S, device = query.shape, rows.shape[1], query.device
    tiles, early = -(-S // TILE_TOKENS), dependent_launch(device)
    parts = num_splits(H, S, PROGRAMS_PER_SM * count_sms(device))
    logits = torch.empty(H, G, tiles * TILE_TOKENS, device=device)
    peaks, totals = torch.empty(2, H, G, parts, device=device)
    ranks = torch.empty(H, tiles, 2, TILE_WORDS, dtype=torch.int32, device=device)
    coarse = torch.empty(H, tiles, BINS, dtype=torch.int32, device=device)
    logsumexps = torch.empty(H, G, device=device)
    _row_logits_kernel[(parts, H)](
        query.contiguous(), keys, rows, logits, peaks, totals, S, logits.stride(1), *keys.stride()[:2], softmax_scale,
        softcap or 0.0, CAPPED=softcap is not None, G=G, GROUP=group_rows(G), D=D, BLOCK_D=power_of_two(D),
        TILE=tile_rows(D, query.dtype, TILE_BYTES), STAGES=STAGES, num_warps=WARPS, **early,
    )  # fmt: skip
    _row_rank_kernel[(tiles, H)](
        logits, peaks, totals, logsumexp, ranks, coarse, logsumexps, S, logits.stride(1), parts, lowest_rank(wanted),
        G=G, SLOTS=TILE_TOKENS, PARTS=power_of_two(parts), FRACTION_BITS=FRACTION_BITS, RANKS=RANKS, BINS=BINS,
        num_warps=RANK_WARPS, **early,
    )  # fmt: skip
    return TokenRanks(ranks, coarse, logsumexps, S)
