"""`rank_for_each` in Triton: a tile of keys is put together from the codebooks, and multiplied with all queries."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.codes.types import CENTROIDS, KeyCodes
from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.common.tiles_triton import (
    LOG2_E,
    capped,
    dot,
    power_of_two,
    wait_for_previous_kernel,
)
from sparsekv.kernels.tables.list_codes import TILE_TOKENS, TILE_WORDS
from sparsekv.kernels.tables.packed_triton import byte_of, exp2, one_each, sums_of_fours
from sparsekv.kernels.tables.types import BINS, FRACTION_BITS, RANKS, TokenRanks, lowest_rank

MOST_ROWS = 64  # of queries, in a tile
SLOTS, WARPS = 128, 4  # keys of a program


@triton.jit
def _named_keys(words, books, head, key, padded, PARTS: tl.constexpr, SIZE: tl.constexpr, CENTROIDS: tl.constexpr):
    """What the codes of some keys stand for [keys, PARTS * SIZE] float16, turned."""
    SOME: tl.constexpr = key.shape[0]
    quad, part, j = tl.arange(0, PARTS // 4), tl.arange(0, PARTS), tl.arange(0, SIZE)
    four = tl.load(words + (head * (PARTS // 4) + quad[None, :]) * padded + key[:, None])
    # Joined axes come last, the first join's before the second's.
    codes = tl.join(tl.join(byte_of(four, 0), byte_of(four, 2)), tl.join(byte_of(four, 1), byte_of(four, 3)))
    codes = tl.reshape(codes, [SOME, PARTS])
    row = (head * PARTS + part[None, :]) * CENTROIDS + codes
    named = tl.load(books + row[:, :, None] * SIZE + j[None, None, :])
    return tl.reshape(named, [SOME, PARTS * SIZE])


@triton.jit
def _query_rows(query, largest, totals, head, first, rows, G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
                D: tl.constexpr):  # fmt: skip
    """Turned queries [ROWS, D] from row `first` on, GROUP rows a token, with what their products are multiplied by and
    the log-sum-exps that are subtracted; of rows that are none, infinity."""
    r, d = first + tl.arange(0, ROWS), tl.arange(0, D)
    token, g = r // GROUP, r % GROUP
    known = (r < rows) & (g < G)
    row = (head * (rows // GROUP) + token) * G + g
    q = tl.load(query + row[:, None] * D + d, mask=known[:, None], other=0.0)
    return (
        q,
        tl.load(largest + row, mask=known, other=0.0),
        tl.load(totals + row, mask=known, other=float("inf")) * LOG2_E,
    )


@triton.jit
def _probabilities(q, k, scale, total, softcap, CAPPED: tl.constexpr):
    """Estimated probabilities [ROWS, keys]."""
    logits = dot(q, tl.trans(k)) * scale[:, None]
    if CAPPED:
        return exp2(capped(logits, softcap, CAPPED) * LOG2_E - total[:, None])
    return exp2(logits * LOG2_E - total[:, None])


@triton.jit
def _packed_ranks(score, first, least, TILE: tl.constexpr, FRACTION_BITS: tl.constexpr, RANKS: tl.constexpr):
    """Ranks of scores [queries, keys] as words [queries, keys / 4], and where these are in a head's of `TokenRanks`."""
    QUERIES: tl.constexpr = score.shape[0]
    SOME: tl.constexpr = score.shape[1]
    i, w = tl.arange(0, SOME), tl.arange(0, SOME // 4)
    rank = (score.to(tl.int32, bitcast=True) >> (23 - FRACTION_BITS)) - least
    rank = tl.minimum(tl.maximum(rank, 0), RANKS - 1)
    by_byte = tl.reshape(rank << (8 * (i // 8 % 4))[None, :], [QUERIES, SOME // 32, 4, 8])
    words = tl.reshape(tl.sum(by_byte, 2), [QUERIES, SOME // 4])
    return words, first // TILE * (TILE // 4) + first % TILE // 8 + w % 2 * (TILE // 8) + w // 2


@triton.jit(do_not_specialize=["rows", "keys", "least"])
def _rank_kernel(
    query, largest, totals, words, books, ranks, rows, keys, padded, least, softcap, CAPPED: tl.constexpr,
    JOINT: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    SIZE: tl.constexpr, CENTROIDS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
    FRACTION_BITS: tl.constexpr, RANKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Ranks of some keys for the queries of a tile, or with JOINT for all queries of a head."""
    first, head, tokens = tl.program_id(0) * SLOTS, tl.program_id(1).to(tl.int64), rows // GROUP
    key = first + tl.arange(0, SLOTS)
    D: tl.constexpr = PARTS * SIZE
    k = _named_keys(words, books, head, key, padded, PARTS, SIZE, CENTROIDS)
    wait_for_previous_kernel(EARLY)
    if JOINT:
        score = tl.zeros([SLOTS], tl.float32)
        for at in range(0, rows, ROWS):
            q, scale, total = _query_rows(query, largest, totals, head, at, rows, G, GROUP, ROWS, D)
            score += tl.sum(_probabilities(q, k, scale, total, softcap, CAPPED), 0)
        score = tl.where(key < keys, score / (tokens * G), 0.0)[None, :]
        packed, place = _packed_ranks(score, first, least, TILE, FRACTION_BITS, RANKS)
        tl.store(ranks + head * (padded // 4) + place[None, :], packed)
    else:
        at = tl.program_id(2) * ROWS
        q, scale, total = _query_rows(query, largest, totals, head, at, rows, G, GROUP, ROWS, D)
        each = _probabilities(q, k, scale, total, softcap, CAPPED)
        score = tl.sum(tl.reshape(each, [ROWS // GROUP, GROUP, SLOTS]), 1) / G
        score = tl.where((key < keys)[None, :], score, 0.0)
        packed, place = _packed_ranks(score, first, least, TILE, FRACTION_BITS, RANKS)
        token = at // GROUP + tl.arange(0, ROWS // GROUP)[:, None]
        tl.store(ranks + (head * tokens + token) * (padded // 4) + place[None, :], packed, mask=token < tokens)


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


def rank_for_each_triton(
    query: torch.Tensor,
    totals: torch.Tensor,
    codes: KeyCodes,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
    *,
    joint: bool = False,
) -> TokenRanks:
    """`rank_for_each` on a GPU; puts the keys together once for every `MOST_ROWS` query rows, with `joint` once."""
    (H, G, T, _), (_, parts, _, size), device = query.shape, codes.books.shape, query.device
    padded, group = codes.words.shape[2], power_of_two(G)
    turned = (query.float() @ codes.turn.float()[:, None]).transpose(1, 2)
    # Codebooks are of float16; so are queries, whose largest number is 1.
    largest = turned.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    turned = (turned / largest).to(codes.books.dtype).contiguous()
    factors, totals = largest * softmax_scale, totals.transpose(1, 2).contiguous()
    heads = H if joint else H * T
    ranks = torch.empty(heads, padded // TILE_TOKENS, 2, TILE_WORDS, dtype=torch.int32, device=device)
    coarse = torch.empty(heads, padded // TILE_TOKENS, BINS, dtype=torch.int32, device=device)
    rows, early = T * group, dependent_launch(device)
    tile = max(16, group, min(MOST_ROWS, power_of_two(rows)))
    _rank_kernel[(padded // SLOTS, H, 1 if joint else triton.cdiv(rows, tile))](
        turned, factors, totals, codes.words, codes.books, ranks, rows, codes.keys, padded, lowest_rank(wanted),
        softcap or 0.0, CAPPED=softcap is not None, JOINT=joint, G=G, GROUP=group, ROWS=tile, PARTS=parts,
        SIZE=size, CENTROIDS=CENTROIDS, SLOTS=SLOTS, TILE=TILE_TOKENS, FRACTION_BITS=FRACTION_BITS, RANKS=RANKS,
        num_warps=WARPS, **early,
    )  # fmt: skip
    _coarse_kernel[(padded // TILE_TOKENS, heads)](ranks, coarse, WORDS=TILE_WORDS, BINS=BINS, num_warps=1, **early)
    return TokenRanks(ranks, coarse, totals.reshape(heads, -1), codes.keys)
