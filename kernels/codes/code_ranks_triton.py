"""`rank_codes` in Triton: the first launch computes tables of products, the second reads the codes once.

A table entry is an int32 word. Its four bytes are the rounded products of four query heads with a centroid, and so one
look-up by a key's code reads all four. The bytes are summed as 16-bit integers, two in a word.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparsekv.kernels.codes.code_ranks import (
    CENTROIDS,
    HEADROOM,
    HEADS_OF_WORD,
    LEAST_OCTAVES,
    LEVELS,
    STEP_ROOM,
    CodeRanks,
)
from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.launch import aligned, count_sms, dependent_launch, group_rows, power_of_two, tile_rows
from sparsekv.kernels.common.tiles_triton import LOG2_E
from sparsekv.kernels.posting_lists import packed_triton as packed
from sparsekv.kernels.posting_lists.list_ranks import (
    FEW_RANKS,
    FINE,
    FINE_FROM,
    FRACTION_BITS,
    RANKS,
    TokenRanks,
    lowest_rank,
)
from sparsekv.kernels.posting_lists.list_ranks_triton import EXACT_PROGRAMS, add_exact
from sparsekv.kernels.posting_lists.posting_lists import TILE_TOKENS, TILE_WORDS

TILE_BYTES, STAGES, WARPS = 16_384, 2, 4
TILES_OF_A_PROGRAM = 2
TURN_ELEMENTS = 2**15  # elements of the turn that a program multiplies by its queries at a time


@triton.jit
def _turn_columns(turn, spans, document, first, PARTS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
                  D: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Load columns [BLOCK_D, COLUMNS] of the turn and their spans [COLUMNS]; a part is padded to PADDED columns."""
    d, column = tl.arange(0, BLOCK_D), first + tl.arange(0, COLUMNS)
    part, j = column // PADDED, column % PADDED
    known, at = (part < PARTS) & (j < SIZE), part * SIZE + j
    columns = tl.load(turn + (document * D + d[:, None]) * D + at, mask=(d < D)[:, None] & known, other=0.0)
    return columns, tl.load(spans + document * D + at, mask=known, other=0.0)


@triton.jit
def _truncated(x):
    """Truncate to bfloat16. The interpreter truncates in conversions, and a GPU rounds; here both truncate."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _reach(q, columns, span, PADDED: tl.constexpr):
    """Bound the distance of any two products of a query with a part's centroids, for the parts of some columns.

    The queries are [GROUP, BLOCK_D]. Returns each query's largest bound [GROUP]. `octaves_of_steps` defines the bound.
    """
    bounds = tl.abs(common.dot(_truncated(q), _truncated(columns))) * span
    return tl.max(tl.sum(tl.reshape(bounds, [bounds.shape[0], bounds.shape[1] // PADDED, PADDED]), 2), 1)


@triton.jit
def _in_tf32(x):
    """Round float32 numbers to the 11 significant bits that tensor cores multiply."""
    if common.WIDEN:
        return x
    word = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,f", [x], tl.int32, is_pure=True, pack=1)
    return word.to(tl.float32, bitcast=True)


@triton.jit
def _make_table(
    query, turn, books, spans, tables, tops, steps, head, document, part, softmax_scale, G: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, CENTROIDS: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr,
    LEVELS: tl.constexpr, LEAST_OCTAVES: tl.constexpr, STEP_ROOM: tl.constexpr, BY_CODE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write a part's table, one byte for each query head and centroid, and each query head's largest product.

    With BY_CODE, the entries of all parts for one code are adjacent; queries, turn and codebooks must be in half
    precision. Otherwise the entries of one part are adjacent.

    The byte is how many steps the query-centroid product is below the query head's largest in the part. The largest
    products are written to `tops`, and part 0 writes the query heads' steps in octaves. `head` is that of the query,
    and `document` the head of the codes.
    """
    g, d, j, c = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_SIZE), tl.arange(0, CENTROIDS)
    of_part = (document * D + d[:, None]) * D + part * SIZE + j
    turning = tl.load(turn + of_part, mask=(d < D)[:, None] & (j < SIZE), other=0.0)
    place = ((document * PARTS + part) * CENTROIDS + c[None, :]) * SIZE + j[:, None]
    book = tl.load(books + place, mask=(j < SIZE)[:, None], other=0.0)
    # Every part's program bounds the distances of all parts, because programs cannot wait for each other.
    columns, span = _turn_columns(turn, spans, document, 0, PARTS, SIZE, PADDED, D, BLOCK_D, COLUMNS)
    common.wait_for_previous_kernel(EARLY)
    q = tl.load(query + (head * G + g[:, None]) * D + d, mask=(g < G)[:, None] & (d < D), other=0.0)
    reach = _reach(q, columns, span, PADDED)
    for at in tl.static_range(1, TURNS):
        columns, span = _turn_columns(turn, spans, document, at * COLUMNS, PARTS, SIZE, PADDED, D, BLOCK_D, COLUMNS)
        reach = tl.maximum(reach, _reach(q, columns, span, PADDED))
    step = tl.maximum(reach * (STEP_ROOM * softmax_scale * LOG2_E), LEAST_OCTAVES) / LEVELS
    if BY_CODE:
        # Numbers in half precision have at most 11 significant bits. So tensor cores multiply them exactly.
        turned = tl.dot(q.to(tl.float32), turning.to(tl.float32), input_precision="tf32")
        large, each = _in_tf32(turned), book.to(tl.float32)
        products = tl.dot(_in_tf32(turned - large), each, input_precision="tf32")
        products = tl.dot(large, each, products, input_precision="tf32") * (softmax_scale * LOG2_E)
    else:
        turned = tl.dot(q.to(tl.float32), turning.to(tl.float32), input_precision="tf32x3")
        products = tl.dot(turned, book.to(tl.float32), input_precision="tf32x3") * (softmax_scale * LOG2_E)
    top = tl.max(products, 1)
    below = tl.floor((top[:, None] - products) * (1.0 / step)[:, None] + 0.5).to(tl.int32)
    # The clamp also keeps NaN products from carrying into the next head's byte.
    below = tl.where((g < G)[:, None], tl.minimum(tl.maximum(below, 0), LEVELS), 0)
    by_word = tl.reshape(below << (8 * (g % 4))[:, None], [GROUP // 4, 4, CENTROIDS])
    WORDS: tl.constexpr = (G + 3) // 4
    word = tl.arange(0, GROUP // 4)
    if BY_CODE:
        place = ((head * WORDS + word[:, None]) * CENTROIDS + c) * PARTS + part
    else:
        place = ((head * PARTS + part) * WORDS + word[:, None]) * CENTROIDS + c
    tl.store(tables + place, tl.sum(by_word, 1), mask=(word < WORDS)[:, None])
    tl.store(tops + (head * G + g) * PARTS + part, top, mask=g < G)
    if part == 0:
        tl.store(steps + head * G + g, step, mask=g < G)


@triton.jit
def _weigh_clusters(
    query, centroids, counts, bias, logits, taken, peaks, totals, head, document, part, parts, sums, C, stride,
    centroids_stride, counts_stride, bias_stride, softmax_scale, softcap, CAPPED: tl.constexpr, G: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    MOST_TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the logits of a program's share of a head's clusters, and set their `taken` counts to zero.

    Also write the peak, in units of log 2, and the sum of exponentials of the logits plus the clusters' log weights.
    """
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    centroids, counts = centroids + document * centroids_stride, counts + document * counts_stride
    logits, bias = logits + head * G * stride, bias + document * bias_stride
    peak = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    first, stop = common.share(part, parts, stride // 16)
    first, stop = tl.multiple_of(first * 16, 16), tl.multiple_of(stop * 16, 16)
    SIZE: tl.constexpr = centroids.dtype.element_ty.primitive_bitwidth // 8
    common.prefetch(centroids + first * D, (tl.minimum(stop, C) - first) * D, MOST_TILES * TILE * BLOCK_D, SIZE, EARLY)
    common.wait_for_previous_kernel(EARLY)
    q = tl.load(query + (head * G + g[:, None]) * D + d, mask=(g < G)[:, None] & (d < D), other=0.0)
    for at in tl.range(first, stop, TILE, num_stages=STAGES):
        c = at + t
        inside = c < stop
        known = inside & (c < C)
        k = tl.load(centroids + c[:, None] * D + d, mask=known[:, None] & (d < D), other=0.0)
        number = tl.load(counts + c, mask=known, other=0)
        factor = tl.load(bias + c, mask=known, other=0.0)
        tl.store(taken + head * C + c, tl.zeros([TILE], tl.int32), mask=known)
        some = common.capped(common.dot(q, tl.trans(k)) * softmax_scale, softcap, CAPPED)
        some = tl.where(number > 0, some, -float("inf"))
        tl.store(logits + g[:, None] * stride + c, some, mask=(g < G)[:, None] & inside)
        some = some * LOG2_E + (factor * LOG2_E + common.log2_of_normal(tl.maximum(number, 1).to(tl.float32)))
        highest = tl.maximum(peak, tl.max(some, 1))
        # All clusters so far may be empty.
        safe = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp2(peak - safe) + tl.sum(tl.exp2(some - safe[:, None]), 1)
        peak = highest
    place = (head * G + g) * sums + part
    tl.store(peaks + place, peak, mask=g < G)
    tl.store(totals + place, total, mask=g < G)


# Several queries over one document are separate heads; `each` of these heads share one head of the document.
@triton.jit(do_not_specialize=["exact_rows", "each"])
def _tables_kernel(
    query, turn, books, spans, centroids, counts, bias, exact_keys, exact_count, sinks, tables, tops, steps, zeroed,
    logits, taken, peaks, totals, bins, shares, sums, C, stride, centroids_stride, counts_stride, bias_stride,
    exact_rows, exact_stride, each, softmax_scale, softcap, SHARED: tl.constexpr, CAPPED: tl.constexpr,
    COUNTED: tl.constexpr, HAS_SINKS: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CENTROIDS: tl.constexpr,
    PADDED: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr, LEVELS: tl.constexpr,
    LEAST_OCTAVES: tl.constexpr, STEP_ROOM: tl.constexpr, EXACT_PROGRAMS: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, MOST_TILES: tl.constexpr, BY_CODE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a part's table, a share of the exact keys or a share of the clusters, depending on the program.

    Program 0 of a head also sets `bins` counters of the head to zero, those that the next kernel adds to.
    """
    which, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    document = (tl.program_id(1) // each).to(tl.int64) if SHARED else head
    if which < PARTS:
        _make_table(
            query, turn, books, spans, tables, tops, steps, head, document, which, softmax_scale, G, GROUP, PARTS, SIZE,
            BLOCK_SIZE, D, BLOCK_D, CENTROIDS, PADDED, COLUMNS, TURNS, LEVELS, LEAST_OCTAVES, STEP_ROOM, BY_CODE,
            EARLY,
        )  # fmt: skip
    elif which < PARTS + EXACT_PROGRAMS:
        common.wait_for_previous_kernel(EARLY)
        add_exact(
            query, exact_keys + (document - head) * exact_stride, exact_count, sinks, peaks, totals, head,
            which - PARTS, sums, exact_rows, exact_stride,
            softmax_scale, softcap, CAPPED, COUNTED, HAS_SINKS, G, GROUP, D, BLOCK_D, EXACT_PROGRAMS, TILE,
        )  # fmt: skip
    else:
        _weigh_clusters(
            query, centroids, counts, bias, logits, taken, peaks, totals, head, document,
            which - PARTS - EXACT_PROGRAMS, shares, sums, C, stride, centroids_stride, counts_stride, bias_stride,
            softmax_scale, softcap, CAPPED, G, GROUP, D, BLOCK_D, TILE, STAGES, MOST_TILES, EARLY,
        )  # fmt: skip
    if which == 0:
        for at in range(0, bins, CENTROIDS):
            bin = at + tl.arange(0, CENTROIDS)
            tl.store(zeroed + head * bins + bin, tl.zeros([CENTROIDS], tl.int32), mask=bin < bins)


SCAN_WARPS = 4
# Number of keys that a program scans at once, and how many times it does so. MANY is used from MANY_TILES tiles per SM
# on, and MOST from MOST_TILES on.
FEW, MANY, MOST = (1024, 1), (2048, 2), (1024, 4)
MANY_TILES, MOST_TILES = 4, 16


@triton.jit
def _places(words, CENTROIDS: tl.constexpr):
    """Compute the indices [..., 2, 2] of each word's four codes in four adjacent tables; one thread holds all four."""
    first = tl.join(packed.byte_of(words, 0), packed.byte_of(words, 1) + CENTROIDS)
    return tl.join(first, tl.join(packed.byte_of(words, 2) + 2 * CENTROIDS, packed.byte_of(words, 3) + 3 * CENTROIDS))


@triton.jit
def _places_of_parts(words, part: tl.constexpr, first, padded, FOURS: tl.constexpr, AT_ONCE: tl.constexpr,
                     CENTROIDS: tl.constexpr):  # fmt: skip
    """Compute the indices [4 FOURS * AT_ONCE] of some keys' codes in the adjacent tables of AT_ONCE parts.

    One thread holds the four codes of a word.
    """
    place = words + part // 4 * padded + first + 4 * tl.arange(0, FOURS)[:, None] + tl.arange(0, 4)
    places = _places(tl.load(place), CENTROIDS)
    if AT_ONCE == 8:
        places = tl.join(places, _places(tl.load(place + padded), CENTROIDS) + 4 * CENTROIDS)
    return tl.reshape(places, [FOURS * 4 * AT_ONCE])


@triton.jit
def _sums_of_parts(words, tables, head, word, first, first_places, padded, FOURS: tl.constexpr, PARTS: tl.constexpr,
                   WORDS: tl.constexpr, AT_ONCE: tl.constexpr, CENTROIDS: tl.constexpr):  # fmt: skip
    """Sum the table entries of some keys over the parts; return two int32 tensors [FOURS, 4].

    A table entry has one byte for each of four query heads. The first tensor packs the 16-bit sums of the first and
    third of these heads. The second tensor packs the sums of the second and fourth. `first_places` is the result of
    `_places_of_parts` for the first parts.
    """
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
        odd += tl.sum(packed.second_and_fourth(found), 2)
    # `every` sums whole words, so it includes the sums of the second and fourth bytes (`odd`), shifted up by eight
    # bits. Subtracting these also removes their carries.
    return every - (odd << 8), odd


@triton.jit
def _partial_sums(peaks, totals, head, sums, g, G: tl.constexpr, SUMS: tl.constexpr):
    """Load the peaks and totals [FEW, SUMS] of a head's clusters and exact keys."""
    s = tl.arange(0, SUMS)
    known, place = (g < G)[:, None] & (s < sums), (head * G + g[:, None]) * sums + s
    return tl.load(peaks + place, mask=known, other=-float("inf")), tl.load(totals + place, mask=known, other=0.0)


@triton.jit
def _logsumexps(part_peaks, part_totals, g, G: tl.constexpr):
    """Combine SUMS partial sums into each query head's log-sum-exp [FEW], to base 2; FEW is G, padded.

    A partial sum has a peak and a total of exponentials beside it [FEW, SUMS].
    """
    peak = tl.where(g < G, tl.max(part_peaks, 1), 0.0)
    total = tl.where(g < G, tl.sum(common.product(part_totals, tl.exp2(part_peaks - peak[:, None])), 1), 1.0)
    return peak + common.log2_of_normal(total)


@triton.jit
def _of_word(numbers, g, word: tl.constexpr):
    """Extract the values of the four query heads of word number `word` from `numbers` [FEW]."""
    # A single reduction is used, because each reduction makes all threads of a program wait twice.
    return tl.reduce(
        (
            tl.where(g == 4 * word, numbers, 0.0),
            tl.where(g == 4 * word + 1, numbers, 0.0),
            tl.where(g == 4 * word + 2, numbers, 0.0),
            tl.where(g == 4 * word + 3, numbers, 0.0),
        ),
        0,
        common.sum_of_four,
    )


@triton.jit
def _scores(
    even, odd, word: tl.constexpr, base, steps, logsumexp, g, softcap, CAPPED: tl.constexpr, G: tl.constexpr,
    SMALL: tl.constexpr,
):  # fmt: skip
    """Compute the estimated probabilities of some keys, summed over the query heads of a word.

    `even` and `odd` are the results of `_sums_of_parts`. With SMALL, each of their 16-bit sums is below 2048.
    """
    if SMALL:
        first, third = packed.two_small_numbers(even)
        second, fourth = packed.two_small_numbers(odd)
    else:
        first, third = (even & 0xFFFF).to(tl.float32), ((even >> 16) & 0xFFFF).to(tl.float32)
        second, fourth = (odd & 0xFFFF).to(tl.float32), ((odd >> 16) & 0xFFFF).to(tl.float32)
    below, tops = (first, second, third, fourth), _of_word(base if CAPPED else base - logsumexp, g, word)
    if CAPPED:
        totals = _of_word(logsumexp, g, word)
    score = tl.zeros(even.shape, tl.float32)
    for group in tl.static_range(0, G - 4 * word if 4 * word + 4 > G else 4):
        step = tl.load(steps + 4 * word + group) * (2.0**24 if SMALL else 1.0)
        logit = tops[group] - below[group] * step
        if CAPPED:
            logit = common.capped(logit / LOG2_E, softcap, CAPPED) * LOG2_E - totals[group]
        score += packed.exp2(logit)
    return score


@triton.jit
def _store_fours(rank, ranks, first, TILE: tl.constexpr):
    """Write ranks [keys / 4, 4], in the key order of `LaidOutCodes`, in the layout of `TokenRanks`.

    They are the ranks of a tile's keys from `first` on.
    """
    w = tl.arange(0, rank.shape[0])
    words = tl.sum(rank << (8 * tl.arange(0, 4)), 1)
    tl.store(ranks + first // 8 + w % 2 * (TILE // 8) + w // 2, words)


@triton.jit(do_not_specialize=["keys", "each", "least"])
def _scan_kernel(
    words, tables, tops, steps, peaks, totals, ranks, coarse, logsumexps, keys, padded, sums, each, least, softcap,
    SHARED: tl.constexpr, CAPPED: tl.constexpr, SMALL: tl.constexpr, G: tl.constexpr, FEW: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, SUMS: tl.constexpr, CENTROIDS: tl.constexpr,
    SLOTS: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr,
    FRACTION_BITS: tl.constexpr, RANKS: tl.constexpr, FEW_RANKS: tl.constexpr, FINE_FROM: tl.constexpr,
    FINE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the ranks of some keys of a tile, in the layout of `TokenRanks`, and add them to the tile's counts."""
    some, head, tiles = tl.program_id(0), tl.program_id(1).to(tl.int64), padded // TILE
    FOURS: tl.constexpr = SLOTS // 4
    i, g, p = tl.arange(0, FOURS)[:, None], tl.arange(0, FEW), tl.arange(0, BLOCK_PARTS)
    words += ((tl.program_id(1) // each).to(tl.int64) if SHARED else head) * (PARTS // 4) * padded
    for quad in tl.static_range(PARTS // 4):
        first_word = words + quad * padded + some * PIECES * SLOTS
        common.prefetch(first_word, PIECES * SLOTS, PIECES * SLOTS, 4, EARLY)
    # Each look-up is a barrier for all threads. Therefore one look-up covers as many parts as possible.
    AT_ONCE: tl.constexpr = 8 if PARTS % 8 == 0 else 4
    first = some * PIECES * SLOTS
    # With few tiles, the indices are computed after the wait. Otherwise a waiting program would hold registers that
    # another program needs.
    if PIECES > 1:
        places = _places_of_parts(words, 0, first, padded, FOURS, AT_ONCE, CENTROIDS)
    common.only_wait(EARLY)
    if PIECES > 1:
        common.let_next_launch(EARLY)
    # These loads precede the look-ups, so that they overlap with the loads of the look-ups.
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
            score += _scores(even, odd, word, base, steps + head * G, logsumexp, g, softcap, CAPPED, G, SMALL)
        # With PIECES == 1, all programs run at once. The next kernel is launched only now, because its programs would
        # otherwise start early, and spread unevenly over the SMs.
        if PIECES == 1:
            common.let_next_launch(EARLY)
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


@dataclass(frozen=True)
class Tables:
    """Results of the first launch for H queries.

    `tables` [H, m, G / 4 rounded up, 256] int32 has the products with centroids: byte g of word w is the distance of
    query head 4 w + g's product below the part's largest product, in steps. `tops` [H, G, m] float32 are the largest
    products, and `steps` [H, G] float32 the steps, in units of log 2. `peaks` and `totals` [H, G, S] float32 are the
    largest logit, in units of log 2, and the sum of exponentials, first of the clusters' shares, then of the exact
    keys. `logits` and `taken` are those of `CodeRanks`.
    """

    tables: torch.Tensor
    tops: torch.Tensor
    steps: torch.Tensor
    peaks: torch.Tensor
    totals: torch.Tensor
    logits: torch.Tensor
    taken: torch.Tensor


def make_tables(query, codes, clusters, exact, zeroed, softmax_scale, softcap, *, by_code):
    """Launch the first kernel for contiguous queries; `zeroed` [H, ...] becomes zero.

    With `by_code`, the tables are [H, 256, m], and queries, turn and codebooks must be in half precision.
    """
    (H, G, D), (documents, m, _, size), device = query.shape, codes.books.shape, query.device
    C, keys, rows = clusters.counts.shape[1], exact.keys, tile_rows(D, query.dtype, TILE_BYTES)
    shares, stride = triton.cdiv(C, rows * TILES_OF_A_PROGRAM), aligned(C)
    sums = shares + EXACT_PROGRAMS
    shape = (H, CENTROIDS, m) if by_code else (H, m, -(-G // HEADS_OF_WORD), CENTROIDS)
    tables = torch.empty(shape, dtype=torch.int32, device=device)
    steps = torch.empty(H, G, device=device)
    tops, logits = torch.empty(H, G, m, device=device), torch.empty(H, G, stride, device=device)
    peaks, totals = torch.empty(H, G, sums, device=device), torch.empty(H, G, sums, device=device)
    taken = torch.empty(H, C, dtype=torch.int32, device=device)
    centroids, counts, bias = clusters.keys.to(query.dtype), clusters.counts, clusters.bias
    padded_columns, padded_size = max(16, power_of_two(m) * power_of_two(size)), power_of_two(size)
    columns = min(padded_columns, TURN_ELEMENTS // power_of_two(D))
    _tables_kernel[(m + EXACT_PROGRAMS + shares, H)](
        query, codes.turn, codes.books, codes.spans, centroids, counts, bias, keys,
        taken if exact.count is None else exact.count, peaks if exact.sinks is None else exact.sinks.contiguous(),
        tables, tops, steps, zeroed, logits, taken, peaks, totals, zeroed[0].numel(), shares, sums, C, stride,
        centroids.stride(0), counts.stride(0), bias.stride(0), keys.shape[1], keys.stride(0), H // documents,
        softmax_scale, softcap or 0.0, SHARED=documents < H, CAPPED=softcap is not None,
        COUNTED=exact.count is not None, HAS_SINKS=exact.sinks is not None, G=G, GROUP=group_rows(G), PARTS=m,
        SIZE=size, BLOCK_SIZE=group_rows(size), D=D, BLOCK_D=power_of_two(D), CENTROIDS=CENTROIDS, PADDED=padded_size,
        COLUMNS=columns, TURNS=padded_columns // columns, LEVELS=LEVELS, LEAST_OCTAVES=LEAST_OCTAVES,
        STEP_ROOM=STEP_ROOM, EXACT_PROGRAMS=EXACT_PROGRAMS, TILE=rows, STAGES=STAGES, MOST_TILES=TILES_OF_A_PROGRAM,
        BY_CODE=by_code, num_warps=WARPS, **dependent_launch(device),
    )  # fmt: skip
    return Tables(tables, tops, steps, peaks, totals, logits, taken)


def rank_codes_triton(query, codes, clusters, exact, wanted, softmax_scale, softcap=None):
    """Run `rank_codes` on a GPU; reads the codes and the clusters' keys once for each query."""
    (H, G, _), (documents, m, _, _), device = query.shape, codes.books.shape, query.device
    query, padded = query.contiguous(), codes.words.shape[2]
    tiles = padded // TILE_TOKENS
    coarse = torch.empty(H, tiles, FEW_RANKS // 2, dtype=torch.int32, device=device)
    made = make_tables(query, codes, clusters, exact, coarse, softmax_scale, softcap, by_code=False)
    sums, of_each = made.peaks.shape[2], H * tiles / count_sms(device)
    scanned, pieces = FEW if of_each < MANY_TILES else MANY if of_each < MOST_TILES else MOST
    ranks = torch.empty(H, tiles, 2, TILE_WORDS, dtype=torch.int32, device=device)
    logsumexp = torch.empty(H, G, device=device)
    _scan_kernel[(padded // (scanned * pieces), H)](
        codes.words, made.tables, made.tops, made.steps, made.peaks, made.totals, ranks, coarse, logsumexp, codes.keys,
        padded, sums, H // documents, lowest_rank(max(1, wanted >> HEADROOM)), softcap or 0.0, SHARED=documents < H,
        CAPPED=softcap is not None, SMALL=m * LEVELS < 2048, G=G, FEW=power_of_two(G), PARTS=m,
        BLOCK_PARTS=power_of_two(m), SUMS=power_of_two(sums), CENTROIDS=CENTROIDS, SLOTS=scanned, PIECES=pieces,
        TILE=TILE_TOKENS, FRACTION_BITS=FRACTION_BITS, RANKS=RANKS, FEW_RANKS=FEW_RANKS, FINE_FROM=FINE_FROM, FINE=FINE,
        num_warps=SCAN_WARPS, **dependent_launch(device),
    )  # fmt: skip
    return CodeRanks(TokenRanks(ranks, coarse, logsumexp, codes.keys), made.logits, made.taken)
