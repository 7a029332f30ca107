"""`rank_codes` in Triton: the codes are read once, with tables of products that another launch has made.

The products of four query heads with a part's centroid are the bytes of a word, which a key's code looks up at once.
They are added as 16-bit integers, two in a word.
"""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.codes.product_tables_triton import ProductTables, make_tables
from sparsekv.kernels.codes.types import CENTROIDS, LEVELS, PER_OCTAVE, CodeRanks, LaidOutCodes, WeighedClusters
from sparsekv.kernels.common.launch import count_sms, dependent_launch
from sparsekv.kernels.common.tiles_triton import (
    LOG2_E,
    capped,
    let_next_launch,
    log2_of_normal,
    only_wait,
    power_of_two,
    prefetch,
    product,
)
from sparsekv.kernels.tables.list_codes import TILE_TOKENS, TILE_WORDS
from sparsekv.kernels.tables.packed_triton import byte_of, exp2, second_and_fourth, sum_of_four, two_small_numbers
from sparsekv.kernels.tables.types import (
    FEW_RANKS,
    FINE,
    FINE_FROM,
    FRACTION_BITS,
    RANKS,
    ExactKeys,
    TokenRanks,
    lowest_rank,
)

SCAN_WARPS = 4
# Keys of a program at a time, and how many times, with few tiles for each SM, many, and most.
FEW, MANY, MOST = (1024, 1), (2048, 2), (1024, 4)
MANY_TILES, MOST_TILES = 4, 16


@triton.jit
def _places(words, CENTROIDS: tl.constexpr):
    """Where four neighbouring tables have what the four codes of each word name: [..., 2, 2], each word's by one
    thread."""
    first = tl.join(byte_of(words, 0), byte_of(words, 1) + CENTROIDS)
    return tl.join(first, tl.join(byte_of(words, 2) + 2 * CENTROIDS, byte_of(words, 3) + 3 * CENTROIDS))


@triton.jit
def _places_of_parts(words, part: tl.constexpr, first, padded, FOURS: tl.constexpr, AT_ONCE: tl.constexpr,
                     CENTROIDS: tl.constexpr):  # fmt: skip
    """Where the neighbouring tables of AT_ONCE parts have what the codes of some keys name, four by one thread:
    [4 FOURS * AT_ONCE]."""
    place = words + part // 4 * padded + first + 4 * tl.arange(0, FOURS)[:, None] + tl.arange(0, 4)
    places = _places(tl.load(place), CENTROIDS)
    if AT_ONCE == 8:
        places = tl.join(places, _places(tl.load(place + padded), CENTROIDS) + 4 * CENTROIDS)
    return tl.reshape(places, [FOURS * 4 * AT_ONCE])


@triton.jit
def _sums_of_parts(words, tables, head, word, first, first_places, padded, FOURS: tl.constexpr, PARTS: tl.constexpr,
                   WORDS: tl.constexpr, AT_ONCE: tl.constexpr, CENTROIDS: tl.constexpr):  # fmt: skip
    """Sums over the parts of what tables say of some keys [FOURS, 4]: of the first and third query head of a word as
    16-bit integers in one number, and of the second and fourth."""
    every, odd = tl.zeros([FOURS, 4], tl.int32), tl.zeros([FOURS, 4], tl.int32)
    entry = tl.arange(0, AT_ONCE * CENTROIDS)
    for part in tl.static_range(0, PARTS, AT_ONCE):
        of_part = (head * PARTS + part + entry // CENTROIDS) * WORDS + word
        table = tl.load(tables + of_part * CENTROIDS + entry % CENTROIDS)
        places = first_places
        if part > 0:
            places = _places_of_parts(words, part, first, padded, FOURS, AT_ONCE, CENTROIDS)
        found = tl.reshape(tl.gather(table, places, 0), [FOURS, 4, AT_ONCE])
        every += tl.sum(found, 2)
        odd += tl.sum(second_and_fourth(found), 2)
    # What the odd bytes added to the even ones' sums is known; that it carries does no harm.
    return every - (odd << 8), odd


@triton.jit
def _partial_sums(peaks, totals, head, sums, g, G: tl.constexpr, SUMS: tl.constexpr):
    """Peaks and totals [FEW, SUMS] of a head's clusters and exact keys."""
    s = tl.arange(0, SUMS)
    known, place = (g < G)[:, None] & (s < sums), (head * G + g[:, None]) * sums + s
    return tl.load(peaks + place, mask=known, other=-float("inf")), tl.load(totals + place, mask=known, other=0.0)


@triton.jit
def _logsumexps(part_peaks, part_totals, g, G: tl.constexpr):
    """[FEW] in units of log 2, of each query head, from those of parts [FEW, SUMS]."""
    peak = tl.where(g < G, tl.max(part_peaks, 1), 0.0)
    total = tl.where(g < G, tl.sum(product(part_totals, tl.exp2(part_peaks - peak[:, None])), 1), 1.0)
    return peak + log2_of_normal(total)


@triton.jit
def _of_word(numbers, g, word: tl.constexpr):
    """The numbers of a word's four query heads, of [FEW]."""
    # One reduction, as each makes all threads of a program wait twice.
    return tl.reduce(
        (
            tl.where(g == 4 * word, numbers, 0.0),
            tl.where(g == 4 * word + 1, numbers, 0.0),
            tl.where(g == 4 * word + 2, numbers, 0.0),
            tl.where(g == 4 * word + 3, numbers, 0.0),
        ),
        0,
        sum_of_four,
    )


@triton.jit
def _scores(
    even, odd, word: tl.constexpr, base, logsumexp, g, softcap, CAPPED: tl.constexpr, G: tl.constexpr,
    SMALL: tl.constexpr, PER_OCTAVE: tl.constexpr,
):  # fmt: skip
    """Estimated probabilities of some keys, summed over the query heads of a word."""
    OCTAVE: tl.constexpr = 2.0**24 / PER_OCTAVE if SMALL else 1 / PER_OCTAVE
    if SMALL:
        first, third = two_small_numbers(even)
        second, fourth = two_small_numbers(odd)
    else:
        first, third = (even & 0xFFFF).to(tl.float32), ((even >> 16) & 0xFFFF).to(tl.float32)
        second, fourth = (odd & 0xFFFF).to(tl.float32), ((odd >> 16) & 0xFFFF).to(tl.float32)
    below, tops = (first, second, third, fourth), _of_word(base if CAPPED else base - logsumexp, g, word)
    if CAPPED:
        totals = _of_word(logsumexp, g, word)
    score = tl.zeros(even.shape, tl.float32)
    for group in tl.static_range(0, G - 4 * word if 4 * word + 4 > G else 4):
        logit = tops[group] - below[group] * OCTAVE
        if CAPPED:
            logit = capped(logit / LOG2_E, softcap, CAPPED) * LOG2_E - totals[group]
        score += exp2(logit)
    return score


@triton.jit
def _store_fours(rank, ranks, first, TILE: tl.constexpr):
    """Write ranks [keys / 4, 4] of a tile's keys from `first` on, in the order of `LaidOutCodes`, as `TokenRanks`."""
    w = tl.arange(0, rank.shape[0])
    words = tl.sum(rank << (8 * tl.arange(0, 4)), 1)
    tl.store(ranks + first // 8 + w % 2 * (TILE // 8) + w // 2, words)


@triton.jit(do_not_specialize=["keys", "each", "least"])
def _scan_kernel(
    words, tables, tops, peaks, totals, ranks, coarse, logsumexps, keys, padded, sums, each, least, softcap,
    SHARED: tl.constexpr, CAPPED: tl.constexpr, SMALL: tl.constexpr, G: tl.constexpr, FEW: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, SUMS: tl.constexpr, CENTROIDS: tl.constexpr,
    PER_OCTAVE: tl.constexpr, SLOTS: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr,
    FRACTION_BITS: tl.constexpr, RANKS: tl.constexpr, FEW_RANKS: tl.constexpr, FINE_FROM: tl.constexpr,
    FINE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Ranks of some keys of a tile in the layout of `TokenRanks`, which are added to the tile's counts of each."""
    some, head, tiles = tl.program_id(0), tl.program_id(1).to(tl.int64), padded // TILE
    FOURS: tl.constexpr = SLOTS // 4
    i, g, p = tl.arange(0, FOURS)[:, None], tl.arange(0, FEW), tl.arange(0, BLOCK_PARTS)
    words += ((tl.program_id(1) // each).to(tl.int64) if SHARED else head) * (PARTS // 4) * padded
    for quad in tl.static_range(PARTS // 4):
        first_word = words + quad * padded + some * PIECES * SLOTS
        prefetch(first_word, PIECES * SLOTS, PIECES * SLOTS, 4, EARLY)
    # A look-up is a barrier of all threads, and so of as many parts at a time as there are words for.
    AT_ONCE: tl.constexpr = 8 if PARTS % 8 == 0 else 4
    first = some * PIECES * SLOTS
    # With few tiles the registers that hold them while the program waits would be another program's.
    if PIECES > 1:
        places = _places_of_parts(words, 0, first, padded, FOURS, AT_ONCE, CENTROIDS)
    only_wait(EARLY)
    if PIECES > 1:
        let_next_launch(EARLY)
    # Asked for before the look-ups, which wait for memory themselves.
    part_peaks, part_totals = _partial_sums(peaks, totals, head, sums, g, G, SUMS)
    best = tl.load(tops + (head * G + g[:, None]) * PARTS + p, mask=(g < G)[:, None] & (p < PARTS), other=0.0)
    WORDS: tl.constexpr = (G + 3) // 4
    counts = tl.zeros([FEW_RANKS], tl.int32)
    for piece in tl.static_range(PIECES):
        if piece > 0:
            first += SLOTS
        if piece > 0 or PIECES == 1:
            places = _places_of_parts(words, 0, first, padded, FOURS, AT_ONCE, CENTROIDS)
        score = tl.zeros([FOURS, 4], tl.float32)
        for word in tl.static_range(WORDS):
            even, odd = _sums_of_parts(
                words, tables, head, word, first, places, padded, FOURS, PARTS, WORDS, AT_ONCE, CENTROIDS
            )
            if piece + word == 0:
                base, logsumexp = tl.sum(best, 1), _logsumexps(part_peaks, part_totals, g, G)
            score += _scores(even, odd, word, base, logsumexp, g, softcap, CAPPED, G, SMALL, PER_OCTAVE)
        # All programs run at once: the next kernel's would come early, and unevenly, between them.
        if PIECES == 1:
            let_next_launch(EARLY)
        key = first + i // 8 * 32 + i % 8 + 8 * tl.arange(0, 4)
        score = tl.where(key < keys, score / G, 0.0)
        rank = (score.to(tl.int32, bitcast=True) >> (23 - FRACTION_BITS)) - least
        rank = tl.minimum(tl.maximum(rank, 0), RANKS - 1)
        rank = (rank + 3 * tl.minimum(tl.maximum(rank - FINE_FROM, 0), FINE) + 1) >> 3
        _store_fours(rank, ranks + (head * tiles + first // TILE) * (TILE // 4), first % TILE, TILE)
        counts += tl.histogram(tl.reshape(rank, [SLOTS]), FEW_RANKS)
    even, odd = tl.split(tl.reshape(counts, [FEW_RANKS // 2, 2]))
    of_tile = head * tiles + some * PIECES * SLOTS // TILE
    place, of_two = coarse + of_tile * (FEW_RANKS // 2) + tl.arange(0, FEW_RANKS // 2), even | (odd << 16)
    tl.atomic_add(place, of_two, mask=of_two != 0, sem="relaxed")
    if some == 0:
        tl.store(logsumexps + head * G + g, logsumexp / LOG2_E, mask=g < G)


def rank_codes_triton(
    query: torch.Tensor,
    codes: LaidOutCodes,
    clusters: WeighedClusters,
    exact: ExactKeys,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> CodeRanks:
    """`rank_codes` on a GPU; reads the codes and the clusters' keys once."""
    found = make_tables(query, codes, clusters, exact, softmax_scale, softcap)
    return CodeRanks(_scan(found, codes, wanted, softcap), found.logits, found.taken)


def _scan(found: ProductTables, codes: LaidOutCodes, wanted: int, softcap: float | None) -> TokenRanks:
    (H, G, m), sums, device = found.tops.shape, found.peaks.shape[2], found.tops.device
    padded, coarse = codes.words.shape[2], found.coarse
    of_each = H * coarse.shape[1] / count_sms(device)
    scanned, pieces = FEW if of_each < MANY_TILES else MANY if of_each < MOST_TILES else MOST
    ranks = torch.empty(H, padded // TILE_TOKENS, 2, TILE_WORDS, dtype=torch.int32, device=device)
    logsumexp = torch.empty(H, G, device=device)
    _scan_kernel[(padded // (scanned * pieces), H)](
        codes.words, found.tables, found.tops, found.peaks, found.totals, ranks, coarse, logsumexp,
        codes.keys, padded, sums, H // len(codes.words), lowest_rank(wanted), softcap or 0.0,
        SHARED=len(codes.words) < H, CAPPED=softcap is not None, SMALL=m * LEVELS < 2048, G=G,
        FEW=power_of_two(G), PARTS=m, BLOCK_PARTS=power_of_two(m), SUMS=power_of_two(sums), SLOTS=scanned,
        PIECES=pieces, TILE=TILE_TOKENS, FRACTION_BITS=FRACTION_BITS, RANKS=RANKS, CENTROIDS=CENTROIDS,
        FEW_RANKS=FEW_RANKS, FINE_FROM=FINE_FROM, FINE=FINE, PER_OCTAVE=PER_OCTAVE,
        num_warps=SCAN_WARPS, **dependent_launch(device),
    )  # fmt: skip
    return TokenRanks(ranks, coarse, logsumexp, codes.keys)
