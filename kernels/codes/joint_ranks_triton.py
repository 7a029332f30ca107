"""`rank_jointly` in Triton: a tile of keys is put together from the codebooks, and multiplied with all queries."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.codes.types import CENTROIDS, HEADROOM, KeyCodes
from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.common.tiles_triton import LOG2_E, capped, dot, power_of_two, wait_for_previous_kernel
from sparsekv.kernels.tables.list_codes import TILE_TOKENS, TILE_WORDS
from sparsekv.kernels.tables.packed_triton import byte_of, exp2, one_each, sums_of_fours
from sparsekv.kernels.tables.types import BINS, FRACTION_BITS, RANKS, TokenRanks, lowest_rank

WIDE = 128  # channels, from which on tiles are halved: shared memory of an older GPU has room for no more
SLOTS, MOST_ROWS, WARPS, STAGES = 128, 64, 4, 2  # keys of a program, and queries that it multiplies with them at once


@triton.jit
def _store_ranks(rank, ranks, first, TILE: tl.constexpr):
    """Write the ranks of some keys of a tile, from key `first` of it on, in the layout of `TokenRanks`."""
    SLOTS: tl.constexpr = rank.shape[0]
    i, w = tl.arange(0, SLOTS), tl.arange(0, SLOTS // 4)
    by_byte = tl.reshape(rank << (8 * (i // 8 % 4)), [SLOTS // 32, 4, 8])
    words = tl.reshape(tl.sum(by_byte, 1), [SLOTS // 4])
    tl.store(ranks + first // 8 + w % 2 * (TILE // 8) + w // 2, words)


@triton.jit
def _named_keys(words, books, head, key, keys, head_stride, quad_stride, key_stride, PARTS: tl.constexpr,
                SIZE: tl.constexpr, CENTROIDS: tl.constexpr):  # fmt: skip
    """What the codes of some keys stand for [keys, PARTS * SIZE] float16, turned."""
    SOME: tl.constexpr = key.shape[0]
    quad, part, j = tl.arange(0, PARTS // 4), tl.arange(0, PARTS), tl.arange(0, SIZE)
    place = words + head * head_stride + quad[None, :] * quad_stride + key[:, None] * key_stride
    four = tl.load(place, mask=key[:, None] < keys, other=0)
    # The axis of the last join is the innermost.
    codes = tl.join(tl.join(byte_of(four, 0), byte_of(four, 2)), tl.join(byte_of(four, 1), byte_of(four, 3)))
    codes = tl.reshape(codes, [SOME, PARTS])
    row = (head * PARTS + part[None, :]) * CENTROIDS + codes
    named = tl.load(books + row[:, :, None] * SIZE + j[None, None, :])
    return tl.reshape(named, [SOME, PARTS * SIZE])


@triton.jit(do_not_specialize=["rows", "keys", "least"])
def _joint_kernel(
    query, factors, totals, words, books, ranks, rows, keys, padded, head_stride, quad_stride, key_stride, least,
    softcap, CAPPED: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
    CENTROIDS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, FRACTION_BITS: tl.constexpr,
    RANKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Ranks of some keys in the layout of `TokenRanks`."""
    D: tl.constexpr = PARTS * SIZE
    first, head = tl.program_id(0) * SLOTS, tl.program_id(1).to(tl.int64)
    i, d = tl.arange(0, SLOTS), tl.arange(0, D)
    k = _named_keys(
        words, books, head, first + i, keys, head_stride, quad_stride, key_stride, PARTS, SIZE, CENTROIDS
    )  # fmt: skip
    wait_for_previous_kernel(EARLY)
    score = tl.zeros([SLOTS], tl.float32)
    for at in range(0, rows, ROWS):
        r = at + tl.arange(0, ROWS)
        place, known = head * rows + r, r < rows
        q = tl.load(query + place[:, None] * D + d, mask=known[:, None], other=0.0)
        factor = tl.load(factors + place, mask=known, other=0.0)
        # Of rows that are none nothing is left.
        total = tl.load(totals + place, mask=known, other=float("inf")) * LOG2_E
        logits = dot(q, tl.trans(k)) * factor[:, None]
        if CAPPED:
            logits = capped(logits, softcap, CAPPED)
        score += tl.sum(exp2(logits * LOG2_E - total[:, None]), 0)
    score = tl.where(first + i < keys, score / rows, 0.0)
    rank = (score.to(tl.int32, bitcast=True) >> (23 - FRACTION_BITS)) - least
    rank = tl.minimum(tl.maximum(rank, 0), RANKS - 1)
    _store_ranks(rank, ranks + head * (padded // 4) + first // TILE * (TILE // 4), first % TILE, TILE)


@triton.jit
def _coarse_kernel(ranks, coarse, WORDS: tl.constexpr, BINS: tl.constexpr, EARLY: tl.constexpr):
    """Counts of a tile's ranks in bins of 16."""
    tile = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    wait_for_previous_kernel(EARLY)
    place = ranks + tile * (2 * WORDS) + tl.arange(0, WORDS)
    some, others = tl.load(place), tl.load(place + WORDS)
    counts = tl.zeros([WORDS], tl.int64)
    for at in tl.static_range(4, 32, 8):
        counts += one_each(some, at) + one_each(others, at)
    tl.store(coarse + tile * BINS + tl.arange(0, BINS), sums_of_fours(counts, WORDS // 4))


def rank_jointly_triton(
    query: torch.Tensor,
    totals: torch.Tensor,
    codes: KeyCodes,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> TokenRanks:
    """`rank_jointly` on a GPU, for parts and sizes that are powers of two; reads the codes once."""
    (H, rows, D), (_, parts, _, size), device = query.shape, codes.books.shape, query.device
    tiles, early = triton.cdiv(codes.keys, TILE_TOKENS), dependent_launch(device)
    slots, most_rows = (SLOTS, MOST_ROWS) if D <= WIDE else (SLOTS // 2, MOST_ROWS // 2)
    turned = query.float() @ codes.turn.float()
    # Codebooks are of float16; so are queries, whose largest number is 1.
    largest = turned.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    turned, totals = (turned / largest).to(codes.books.dtype).contiguous(), totals.contiguous()
    ranks = torch.empty(H, tiles, 2, TILE_WORDS, dtype=torch.int32, device=device)
    coarse = torch.empty(H, tiles, BINS, dtype=torch.int32, device=device)
    _joint_kernel[(tiles * TILE_TOKENS // slots, H)](
        turned, largest * softmax_scale, totals, codes.words, codes.books, ranks, rows, codes.keys,
        tiles * TILE_TOKENS, *codes.words.stride(), lowest_rank(max(1, wanted >> HEADROOM)), softcap or 0.0,
        CAPPED=softcap is not None, ROWS=max(16, min(most_rows, power_of_two(rows))), PARTS=parts, SIZE=size,
        CENTROIDS=CENTROIDS, SLOTS=slots, TILE=TILE_TOKENS, FRACTION_BITS=FRACTION_BITS, RANKS=RANKS,
        num_warps=WARPS, num_stages=STAGES, **early,
    )  # fmt: skip
    _coarse_kernel[(tiles, H)](ranks, coarse, WORDS=TILE_WORDS, BINS=BINS, num_warps=1, **early)
    return TokenRanks(ranks, coarse, totals, codes.keys)
