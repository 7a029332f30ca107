"""`rank_tokens` in Triton: lists of the nearest centroids, then logits and their sums, then ranks and their counts.

Logits are summed as two 12-bit integers in a word: a mask extracts two codes from a list's word, and one multiply-add
adds both. Exponentials relative to the tile's largest are stored as a byte each, the bits of a bfloat16 that vary,
until the sum over all tiles is known; a rank then takes an instruction or two for each query.
"""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common.launch import count_sms, dependent_launch
from sparsekv.kernels.common.tiles_triton import LOG2_E, capped, power_of_two, wait_for_previous_kernel
from sparsekv.kernels.tables.list_codes import HIGHEST, TILE_TOKENS, TILE_WORDS, ListCodes
from sparsekv.kernels.tables.list_look_up_triton import look_up_lists
from sparsekv.kernels.tables.packed_triton import (
    TO_BYTES,
    add_scaled,
    as_bytes,
    between,
    even_bytes,
    exp2,
    odd_bytes,
    one_each,
    pair,
    sums_of_fours,
    two_numbers,
)
from sparsekv.kernels.tables.types import BINS, LARGEST, ExactKeys, TokenRanks, lowest_rank

LOGIT_WARPS = 4
# Many programs are bound by instructions: one warp runs once what is common to the program, four warps run it each.
WARPS_OF_FEW, WARPS_OF_MANY = 4, 1
TILES_OF_A_PROGRAM = 2  # if there are tiles enough for all SMs: a query's scale is then computed once for two tiles
MANY = 16  # programs for each SM that keep it busy
TWO_CODES, NEXT_TWO_CODES = tl.constexpr(0x000F000F), tl.constexpr(0x00F000F0)
BOTH = tl.constexpr(0x00010001)


@triton.jit
def _scale(slopes, floors, PARTS: tl.constexpr, ROOM: tl.constexpr, HIGHEST: tl.constexpr):
    """For one query: the integer weight per unit of slope, the logit of 1 in an integer sum, the logit of 0, and the
    initial sum, large enough that negative weights leave no negative sum."""
    size, base = 0.0, 0.0
    for part in tl.static_range(PARTS):
        size += tl.abs(tl.load(slopes + part))
        base += tl.load(floors + part)
    per = tl.where(size > 0, ROOM / tl.maximum(size, 1e-30), 0.0)
    begin = 0
    for part in tl.static_range(PARTS):
        begin += HIGHEST * tl.maximum(-_whole(tl.load(slopes + part), per), 0)
    return per, size / ROOM, base - begin * (size / ROOM), begin


@triton.jit
def _whole(slope, per):
    return tl.floor(slope * per + 0.5).to(tl.int32)


@triton.jit
def _logit(number, unit, base, softcap, CAPPED: tl.constexpr):
    """Logit / ln 2 of an integer sum, which is passed plus 2 ** 23."""
    return capped((number - 8388608.0) * unit + base, softcap, CAPPED) * LOG2_E


@triton.jit
def _weights(word, slope, unit, base, peak, highest, left, softcap, CAPPED: tl.constexpr, WHOLE: tl.constexpr):
    """Exponentials of the two logits in each word relative to the tile's largest, packed in a word, and their sum."""
    low, high = two_numbers(word)
    if CAPPED:
        low, high = _logit(low, unit, base, softcap, True) - peak, _logit(high, unit, base, softcap, True) - peak
    else:
        # Integers are subtracted first, which is exact.
        low, high = (low - highest) * slope, (high - highest) * slope
    low, high = exp2(low), exp2(high)
    if not WHOLE:
        low, high = tl.where(left > 0, low, 0.0), tl.where(left > 16, high, 0.0)
    return pair(low, high), low + high


@triton.jit
def _store_weights(
    a, b, c, d, unit, base, target, peaks, totals, left, softcap, CAPPED: tl.constexpr, WORDS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the `_weights` of a tile's integer sums as bytes, with their peak and total."""
    highest = _highest(a, left, WHOLE)
    highest = tl.maximum(highest, _highest(b, left - 8, WHOLE))
    highest = tl.maximum(highest, tl.maximum(_highest(c, left - 1, WHOLE), _highest(d, left - 9, WHOLE)))
    highest = tl.max(highest, 0)
    peak, slope = _logit(highest, unit, base, softcap, CAPPED), unit * LOG2_E
    a, some = _weights(a, slope, unit, base, peak, highest, left, softcap, CAPPED, WHOLE)
    b, of_b = _weights(b, slope, unit, base, peak, highest, left - 8, softcap, CAPPED, WHOLE)
    c, of_c = _weights(c, slope, unit, base, peak, highest, left - 1, softcap, CAPPED, WHOLE)
    d, of_d = _weights(d, slope, unit, base, peak, highest, left - 9, softcap, CAPPED, WHOLE)
    tl.store(target, as_bytes(a, b))
    tl.store(target + WORDS, as_bytes(c, d))
    tl.store(peaks, peak)
    tl.store(totals, tl.sum((some + of_b) + (of_c + of_d), 0))


@triton.jit
def _highest(word, left, WHOLE: tl.constexpr):
    low, high = two_numbers(word)
    if not WHOLE:
        low, high = tl.where(left > 0, low, 8388608.0), tl.where(left > 16, high, 8388608.0)
    return tl.maximum(low, high)


@triton.jit(do_not_specialize=["keys", "tiles"])
def _weights_kernel(
    codes, lists, slopes, floors, weights, peaks, totals, keys, tiles, sums, softcap, CAPPED: tl.constexpr,
    PARTS: tl.constexpr, WORDS: tl.constexpr, ROOM: tl.constexpr, HIGHEST: tl.constexpr, TILES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """For one query and some tiles of keys: exponentials of logits relative to their tile's largest, as bytes; and each
    tile's largest logit / ln 2 and sum of exponentials."""
    wait_for_previous_kernel(EARLY)
    query = tl.program_id(1).to(tl.int64)
    w = tl.arange(0, WORDS)
    place = query * PARTS
    per, unit, base, begin = _scale(slopes + place, floors + place, PARTS, ROOM, HIGHEST)
    first = tl.program_id(0) * TILES
    for tile in range(first, tl.minimum(first + TILES, tiles)):
        a = tl.full([WORDS], 0, tl.int32) + begin * BOTH
        b = a << 4
        c, d = a, b
        for part in tl.static_range(PARTS):
            listed = tl.load(lists + place + part).to(tl.int64)
            word = tl.load(codes + (listed * tiles + tile) * WORDS + w)
            weight = _whole(tl.load(slopes + place + part), per)
            a += (word & TWO_CODES) * weight
            b += (word & NEXT_TWO_CODES) * weight
            word >>= 8
            c += (word & TWO_CODES) * weight
            d += (word & NEXT_TWO_CODES) * weight
        # These sums are shifted up by four bits; none has more than 12.
        b, d = (b >> 4) & 0x0FFF0FFF, (d >> 4) & 0x0FFF0FFF
        target = weights + (query * tiles + tile) * (2 * WORDS) + w
        left = keys - (tile * (8 * WORDS) + 32 * (w // 4) + 2 * (w % 4))
        to_peak, to_total = peaks + query * sums + tile, totals + query * sums + tile
        if (tile + 1) * (8 * WORDS) <= keys:
            _store_weights(
                a, b, c, d, unit, base, target, to_peak, to_total, left, softcap, CAPPED, WORDS, True
            )  # fmt: skip
        else:
            _store_weights(
                a, b, c, d, unit, base, target, to_peak, to_total, left, softcap, CAPPED, WORDS, False
            )  # fmt: skip


@triton.jit
def _four_ranks(one, next_one, least, most):
    one, next_one = between(one, least, most) - least, between(next_one, least, most) - least
    return ((one >> 3) & 0x00FF00FF) | ((next_one << 5) & -16711936)


@triton.jit(do_not_specialize=["least"])
def _rank_kernel(
    weights, peaks, totals, ranks, coarse, logsumexps, least, sums, G: tl.constexpr, FEW: tl.constexpr,
    WORDS: tl.constexpr, SUMS: tl.constexpr, BINS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Ranks of a tile of keys, and their counts in bins of 16 ranks."""
    wait_for_previous_kernel(EARLY)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    # Heads in reverse order: what was written last is still in the cache.
    head = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    w, s, g = tl.arange(0, WORDS), tl.arange(0, SUMS), tl.arange(0, FEW)
    place = (head * G + g[:, None]) * sums + s
    known = (g < G)[:, None] & (s < sums)
    part_peaks = tl.load(peaks + place, mask=known, other=-float("inf"))
    part_totals = tl.load(totals + place, mask=known, other=0.0)
    own_peak = tl.load(peaks + (head * G + g) * sums + tile, mask=g < G, other=0.0)
    peak = tl.where(g < G, tl.max(part_peaks, 1), 0.0)
    total = tl.sum(part_totals * tl.exp2(part_peaks - peak[:, None]), 1)
    logsumexp = peak + tl.log2(tl.where(g < G, total, 1.0))
    if tile == 0:
        tl.store(logsumexps + head * G + g, logsumexp / LOG2_E, mask=g < G)
    factor = tl.exp2(own_peak - logsumexp + TO_BYTES) / G
    factors = pair(factor, factor)
    a = tl.zeros([WORDS], tl.int32)
    b, c, d = a, a, a
    for group in tl.static_range(G):
        source = weights + ((head * G + group) * tiles + tile) * (2 * WORDS) + w
        one = tl.sum(tl.where(g == group, factors, 0), 0)
        first, second = tl.load(source), tl.load(source + WORDS)
        a, b = add_scaled(a, even_bytes(first), one), add_scaled(b, odd_bytes(first), one)
        c, d = add_scaled(c, even_bytes(second), one), add_scaled(d, odd_bytes(second), one)
    # Scores of the first and last rank as bfloat16 pairs, which have three bits more than a rank.
    lowest = (least << 3) * BOTH
    last = lowest + (8 * BINS * BINS - 1) * BOTH
    ab, cd = _four_ranks(a, b, lowest, last), _four_ranks(c, d, lowest, last)
    target = ranks + (head * tiles + tile) * (2 * WORDS) + w
    tl.store(target, ab)
    tl.store(target + WORDS, cd)
    counts = tl.zeros([WORDS], tl.int64)
    for at in tl.static_range(4, 32, 8):
        counts += one_each(ab, at) + one_each(cd, at)
    counts = sums_of_fours(counts, WORDS // 4)
    tl.store(coarse + (head * tiles + tile) * BINS + tl.arange(0, BINS), counts)


def many(programs: int, device: torch.device) -> bool:
    """Whether there are programs enough to keep all SMs busy."""
    return programs >= MANY * count_sms(device)


def rank_tokens_triton(
    query: torch.Tensor,
    lists: ListCodes,
    exact: ExactKeys,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> TokenRanks:
    """`rank_tokens` on a GPU; reads the lists' codes once, and one byte for each logit."""
    (H, G, _), m, device = query.shape, lists.centroids.shape[1], query.device
    early, tiles = dependent_launch(device), lists.codes.shape[3] // TILE_WORDS
    found = look_up_lists(query, lists, exact, tiles, softmax_scale, softcap)
    sums = found.peaks.shape[2]
    weights = torch.empty(H, G, tiles, TILE_TOKENS // 4, dtype=torch.int32, device=device)
    ranks = torch.empty(H, tiles, 2, TILE_WORDS, dtype=torch.int32, device=device)
    coarse = torch.empty(H, tiles, BINS, dtype=torch.int32, device=device)
    logsumexps = torch.empty(H, G, device=device)
    several = TILES_OF_A_PROGRAM if many(H * G * tiles, device) else 1
    _weights_kernel[(-(-tiles // several), H * G)](
        lists.codes, found.lists, found.slopes, found.floors, weights, found.peaks, found.totals, lists.keys, tiles,
        sums, softcap or 0.0, CAPPED=softcap is not None, PARTS=m, WORDS=TILE_WORDS, ROOM=LARGEST // HIGHEST - m,
        HIGHEST=HIGHEST, TILES=several, num_warps=LOGIT_WARPS, **early,
    )  # fmt: skip
    _rank_kernel[(tiles, H)](
        weights, found.peaks, found.totals, ranks, coarse, logsumexps, lowest_rank(wanted), sums, G=G,
        FEW=power_of_two(G), WORDS=TILE_WORDS, SUMS=power_of_two(sums), BINS=BINS,
        num_warps=WARPS_OF_MANY if many(tiles * H, device) else WARPS_OF_FEW, **early,
    )  # fmt: skip
    return TokenRanks(ranks, coarse, logsumexps, lists.keys)
