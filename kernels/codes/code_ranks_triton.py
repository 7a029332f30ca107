"""`rank_codes` in Triton: tables of products, clusters and exact keys in one launch; then the codes, read once.

The products of four query heads with a part's centroid are the bytes of a word, which a key's code looks up at once.
They are added as 16-bit integers, two in a word.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparsekv.kernels.codes.types import CENTROIDS, LEVELS, PER_OCTAVE, CodeRanks, KeyCodes, WeighedClusters
from sparsekv.kernels.common.launch import count_sms, dependent_launch, num_splits
from sparsekv.kernels.common.tiles_triton import (
    LOG2_E,
    aligned,
    capped,
    dot,
    group_rows,
    power_of_two,
    prefetch,
    share,
    tile_rows,
    wait_for_previous_kernel,
)
from sparsekv.kernels.tables.list_codes import TILE_TOKENS, TILE_WORDS
from sparsekv.kernels.tables.list_look_up_triton import EXACT_PROGRAMS, add_exact
from sparsekv.kernels.tables.packed_triton import byte_of, exp2, second_and_fourth
from sparsekv.kernels.tables.types import BINS, FRACTION_BITS, RANKS, ExactKeys, TokenRanks, lowest_rank

HEADS_OF_WORD = 4
TILE_BYTES, STAGES, WARPS, PROGRAMS_PER_SM = 32_768, 2, 4, 4
SCANNED, SCAN_WARPS = 1024, 4
PIECES_OF_FEW, PIECES_OF_MANY = 2, 4  # times as many keys of a program, with few and many tiles for each SM
MANY_TILES = 4


@dataclass(frozen=True)
class _Found:
    """tables [H, m, words, 256] int32; tops [H, G, m], each part's best product / ln 2; coarse, the counts of a
    `TokenRanks`, 0; peaks and totals [H, G, sums] of the clusters' shares, then of the exact keys."""

    tables: torch.Tensor
    tops: torch.Tensor
    coarse: torch.Tensor
    peaks: torch.Tensor
    totals: torch.Tensor


@triton.jit
def _make_table(
    query, turn, books, tables, tops, head, part, softmax_scale, G: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CENTROIDS: tl.constexpr, LEVELS: tl.constexpr, PER_OCTAVE: tl.constexpr,
):  # fmt: skip
    """How far the products of a part of the turned queries with its centroids are below the best of each, in bytes."""
    g, d, j, c = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_SIZE), tl.arange(0, CENTROIDS)
    q = tl.load(query + (head * G + g[:, None]) * D + d, mask=(g < G)[:, None] & (d < D), other=0.0)
    of_part = (head * D + d[:, None]) * D + part * SIZE + j
    turning = tl.load(turn + of_part, mask=(d < D)[:, None] & (j < SIZE), other=0.0)
    place = ((head * PARTS + part) * CENTROIDS + c[None, :]) * SIZE + j[:, None]
    book = tl.load(books + place, mask=(j < SIZE)[:, None], other=0.0)
    turned = tl.dot(q.to(tl.float32), turning.to(tl.float32), input_precision="tf32x3")
    products = tl.dot(turned, book.to(tl.float32), input_precision="tf32x3") * (softmax_scale * LOG2_E)
    top = tl.max(products, 1)
    below = tl.floor((top[:, None] - products) * PER_OCTAVE + 0.5).to(tl.int32)
    # Products that are not numbers must not carry into the next head's byte either.
    below = tl.where((g < G)[:, None], tl.minimum(tl.maximum(below, 0), LEVELS), 0)
    by_word = tl.reshape(below << (8 * (g % 4))[:, None], [GROUP // 4, 4, CENTROIDS])
    WORDS: tl.constexpr = (G + 3) // 4
    word = tl.arange(0, GROUP // 4)
    place = ((head * PARTS + part) * WORDS + word[:, None]) * CENTROIDS + c
    tl.store(tables + place, tl.sum(by_word, 1), mask=(word < WORDS)[:, None])
    tl.store(tops + (head * G + g) * PARTS + part, top, mask=g < G)


@triton.jit
def _weigh_clusters(
    query, centroids, counts, bias, logits, taken, peaks, totals, head, part, parts, sums, C, stride, centroids_stride,
    counts_stride, bias_stride, softmax_scale, softcap, CAPPED: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Logits of a program's share of a head's clusters, with peak / ln 2 and total of what they weigh; and zeros."""
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    q = tl.load(query + (head * G + g[:, None]) * D + d, mask=(g < G)[:, None] & (d < D), other=0.0)
    centroids, counts = centroids + head * centroids_stride, counts + head * counts_stride
    logits, bias = logits + head * G * stride, bias + head * bias_stride
    peak = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    first, stop = share(part, parts, stride // 16)
    first, stop = tl.multiple_of(first * 16, 16), tl.multiple_of(stop * 16, 16)
    for at in tl.range(first, stop, TILE, num_stages=STAGES):
        c = at + t
        inside = c < stop
        known = inside & (c < C)
        k = tl.load(centroids + c[:, None] * D + d, mask=known[:, None] & (d < D), other=0.0)
        number = tl.load(counts + c, mask=known, other=0)
        factor = tl.load(bias + c, mask=known, other=0.0)
        tl.store(taken + head * C + c, tl.zeros([TILE], tl.int32), mask=known)
        some = capped(dot(q, tl.trans(k)) * softmax_scale, softcap, CAPPED)
        some = tl.where(number > 0, some, -float("inf"))
        tl.store(logits + g[:, None] * stride + c, some, mask=(g < G)[:, None] & inside)
        some = (some + factor) * LOG2_E + tl.log2(tl.maximum(number, 1).to(tl.float32))
        highest = tl.maximum(peak, tl.max(some, 1))
        # All clusters so far may be empty.
        safe = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp2(peak - safe) + tl.sum(tl.exp2(some - safe[:, None]), 1)
        peak = highest
    place = (head * G + g) * sums + part
    tl.store(peaks + place, peak, mask=g < G)
    tl.store(totals + place, total, mask=g < G)


@triton.jit(do_not_specialize=["exact_rows"])
def _tables_kernel(
    query, turn, books, centroids, counts, bias, exact_keys, exact_count, tables, tops, coarse, logits, taken, peaks,
    totals, bins, shares, sums, C, stride, centroids_stride, counts_stride, bias_stride, exact_rows, exact_stride,
    softmax_scale, softcap, CAPPED: tl.constexpr, COUNTED: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CENTROIDS: tl.constexpr, LEVELS: tl.constexpr, PER_OCTAVE: tl.constexpr, EXACT_PROGRAMS: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A part's table, or a share of the exact keys, or a share of the clusters; and zeros for the counts of ranks."""
    wait_for_previous_kernel(EARLY)
    which, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if which == 0:
        for at in range(0, bins, CENTROIDS):
            bin = at + tl.arange(0, CENTROIDS)
            tl.store(coarse + head * bins + bin, tl.zeros([CENTROIDS], tl.int32), mask=bin < bins)
    if which < PARTS:
        _make_table(
            query, turn, books, tables, tops, head, which, softmax_scale, G, GROUP, PARTS, SIZE, BLOCK_SIZE, D,
            BLOCK_D, CENTROIDS, LEVELS, PER_OCTAVE,
        )  # fmt: skip
    elif which < PARTS + EXACT_PROGRAMS:
        add_exact(
            query, exact_keys, exact_count, peaks, totals, head, which - PARTS, sums, exact_rows, exact_stride,
            softmax_scale, softcap, CAPPED, COUNTED, G, GROUP, D, BLOCK_D, EXACT_PROGRAMS, TILE,
        )  # fmt: skip
    else:
        _weigh_clusters(
            query, centroids, counts, bias, logits, taken, peaks, totals, head, which - PARTS - EXACT_PROGRAMS, shares,
            sums, C, stride, centroids_stride, counts_stride, bias_stride, softmax_scale, softcap, CAPPED, G, GROUP, D,
            BLOCK_D, TILE, STAGES,
        )  # fmt: skip


@triton.jit
def _sums_of_parts(words, tables, head, word, slot, padded, PARTS: tl.constexpr, WORDS: tl.constexpr,
                   CENTROIDS: tl.constexpr):  # fmt: skip
    """Sums over the parts of what tables say of some keys: of the first and third query head of a word as 16-bit
    integers in one number, and of the second and fourth."""
    every, odd = tl.zeros(slot.shape, tl.int32), tl.zeros(slot.shape, tl.int32)
    for part in tl.static_range(PARTS):
        four = tl.load(words + (head * (PARTS // 4) + part // 4) * padded + slot)
        place = tables + ((head * PARTS + part) * WORDS + word) * CENTROIDS
        found = tl.gather(tl.load(place + tl.arange(0, CENTROIDS)), byte_of(four, part % 4), 0)
        every += found
        odd += second_and_fourth(found)
    # What the odd bytes added to the even ones' sums is known; that it carries does no harm.
    return every - (odd << 8), odd


@triton.jit(do_not_specialize=["keys", "least"])
def _scan_kernel(
    words, tables, tops, peaks, totals, ranks, coarse, logsumexps, keys, padded, sums, least, softcap,
    CAPPED: tl.constexpr, G: tl.constexpr, FEW: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    SUMS: tl.constexpr, CENTROIDS: tl.constexpr, PER_OCTAVE: tl.constexpr, SLOTS: tl.constexpr, PIECES: tl.constexpr,
    TILE: tl.constexpr, FRACTION_BITS: tl.constexpr, RANKS: tl.constexpr, BINS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Ranks of some keys of a tile in the layout of `TokenRanks`, which are added to the tile's counts of 16 ranks."""
    some, head, tiles = tl.program_id(0), tl.program_id(1).to(tl.int64), padded // TILE
    i, g, s, p = tl.arange(0, SLOTS), tl.arange(0, FEW), tl.arange(0, SUMS), tl.arange(0, BLOCK_PARTS)
    for quad in tl.static_range(PARTS // 4):
        first_word = words + (head * (PARTS // 4) + quad) * padded + some * PIECES * SLOTS
        prefetch(first_word, PIECES * SLOTS, PIECES * SLOTS, 4, EARLY)
    wait_for_previous_kernel(EARLY)
    known = (g < G)[:, None] & (s < sums)
    part_peaks = tl.load(peaks + (head * G + g[:, None]) * sums + s, mask=known, other=-float("inf"))
    part_totals = tl.load(totals + (head * G + g[:, None]) * sums + s, mask=known, other=0.0)
    peak = tl.where(g < G, tl.max(part_peaks, 1), 0.0)
    logsumexp = peak + tl.log2(tl.where(g < G, tl.sum(part_totals * tl.exp2(part_peaks - peak[:, None]), 1), 1.0))
    if some == 0:
        tl.store(logsumexps + head * G + g, logsumexp / LOG2_E, mask=g < G)
    best = tl.load(tops + (head * G + g[:, None]) * PARTS + p, mask=(g < G)[:, None] & (p < PARTS), other=0.0)
    base = tl.sum(best, 1)
    WORDS: tl.constexpr = (G + 3) // 4
    counts = tl.zeros([BINS], tl.int32)
    for piece in range(PIECES):
        first = (some * PIECES + piece) * SLOTS
        slot = first + i
        score = tl.zeros([SLOTS], tl.float32)
        for word in tl.static_range(WORDS):
            even, odd = _sums_of_parts(words, tables, head, word, slot, padded, PARTS, WORDS, CENTROIDS)
            for group in tl.static_range(word * 4, G if word * 4 + 4 > G else word * 4 + 4):
                sums_of_two = even if group % 2 == 0 else odd
                below = ((sums_of_two >> (16 * (group % 4 // 2))) & 0xFFFF).to(tl.float32)
                top, total = tl.sum(tl.where(g == group, base, 0.0), 0), tl.sum(tl.where(g == group, logsumexp, 0.0), 0)
                if CAPPED:
                    logit = capped((top - below / PER_OCTAVE) / LOG2_E, softcap, CAPPED) * LOG2_E - total
                else:
                    logit = (top - total) - below / PER_OCTAVE
                score += exp2(logit)
        score = tl.where(slot < keys, score / G, 0.0)
        rank = (score.to(tl.int32, bitcast=True) >> (23 - FRACTION_BITS)) - least
        rank = tl.minimum(tl.maximum(rank, 0), RANKS - 1)
        by_byte = tl.reshape(rank << (8 * (i // 8 % 4)), [SLOTS // 32, 4, 8])
        packed = tl.reshape(tl.sum(by_byte, 1), [SLOTS // 4])
        w = tl.arange(0, SLOTS // 4)
        at = (head * tiles + first // TILE) * (TILE // 4) + first % TILE // 8
        tl.store(ranks + at + w % 2 * (TILE // 8) + w // 2, packed)
        counts += tl.histogram(rank // BINS, BINS)
    place = coarse + (head * tiles + some * PIECES * SLOTS // TILE) * BINS + tl.arange(0, BINS)
    tl.atomic_add(place, counts, sem="relaxed")


def rank_codes_triton(
    query: torch.Tensor,
    codes: KeyCodes,
    clusters: WeighedClusters,
    exact: ExactKeys,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> CodeRanks:
    """`rank_codes` on a GPU; reads the codes and the clusters' keys once."""
    (H, G, D), (_, m, _, size), device = query.shape, codes.books.shape, query.device
    C, query = clusters.counts.shape[1], query.contiguous()
    rows, sms, early = tile_rows(D, query.dtype, TILE_BYTES), count_sms(device), dependent_launch(device)
    # At most one program for each tile: the sums of fewer programs are merged sooner.
    shares = num_splits(H, C, min(PROGRAMS_PER_SM, triton.cdiv(H * triton.cdiv(C, rows), sms)) * sms)
    stride, sums = aligned(C), shares + EXACT_PROGRAMS
    tables = torch.empty(H, m, -(-G // HEADS_OF_WORD), CENTROIDS, dtype=torch.int32, device=device)
    tops, logits = torch.empty(H, G, m, device=device), torch.empty(H, G, stride, device=device)
    peaks, totals = torch.empty(2, H, G, sums, device=device)
    taken = torch.empty(H, C, dtype=torch.int32, device=device)
    centroids = clusters.keys.to(query.dtype)
    coarse = torch.empty(H, codes.words.shape[2] // TILE_TOKENS, BINS, dtype=torch.int32, device=device)
    found = _Found(tables, tops, coarse, peaks, totals)
    _tables_kernel[(m + EXACT_PROGRAMS + shares, H)](
        query, codes.turn, codes.books, centroids, clusters.counts, clusters.bias, exact.keys,
        taken if exact.count is None else exact.count, tables, tops, coarse, logits, taken, peaks, totals,
        coarse.shape[1] * BINS, shares, sums, C, stride, centroids.stride(0), clusters.counts.stride(0),
        clusters.bias.stride(0), exact.keys.shape[1], exact.keys.stride(0), softmax_scale, softcap or 0.0,
        CAPPED=softcap is not None, COUNTED=exact.count is not None, G=G, GROUP=group_rows(G), PARTS=m, SIZE=size,
        BLOCK_SIZE=group_rows(size), D=D, BLOCK_D=power_of_two(D), EXACT_PROGRAMS=EXACT_PROGRAMS,
        TILE=rows, STAGES=STAGES, CENTROIDS=CENTROIDS,
        LEVELS=LEVELS, PER_OCTAVE=PER_OCTAVE, num_warps=WARPS, **early,
    )  # fmt: skip
    return CodeRanks(_scan(found, codes, wanted, softcap), logits, taken)


def _scan(found: _Found, codes: KeyCodes, wanted: int, softcap: float | None) -> TokenRanks:
    (H, G, m), sums, device = found.tops.shape, found.peaks.shape[2], found.tops.device
    padded, coarse = codes.words.shape[2], found.coarse
    pieces = PIECES_OF_MANY if H * coarse.shape[1] >= MANY_TILES * count_sms(device) else PIECES_OF_FEW
    ranks = torch.empty(H, padded // TILE_TOKENS, 2, TILE_WORDS, dtype=torch.int32, device=device)
    logsumexp = torch.empty(H, G, device=device)
    _scan_kernel[(padded // (SCANNED * pieces), H)](
        codes.words, found.tables, found.tops, found.peaks, found.totals, ranks, coarse, logsumexp,
        codes.keys, padded, sums, lowest_rank(wanted), softcap or 0.0, CAPPED=softcap is not None, G=G,
        FEW=power_of_two(G), PARTS=m, BLOCK_PARTS=power_of_two(m), SUMS=power_of_two(sums), SLOTS=SCANNED,
        PIECES=pieces, TILE=TILE_TOKENS, FRACTION_BITS=FRACTION_BITS, RANKS=RANKS, BINS=BINS, CENTROIDS=CENTROIDS,
        PER_OCTAVE=PER_OCTAVE, num_warps=SCAN_WARPS, **dependent_launch(device),
    )  # fmt: skip
    return TokenRanks(ranks, coarse, logsumexp, codes.keys)
