"""`rank_tokens` in Triton, in three kernels.

The first kernel finds the lists of the nearest centroids. The second computes the logits and the sums of their
exponentials. The third computes the ranks and their counts.

An int32 word holds two logits as 12-bit integer sums: a mask extracts two codes from a list's word, and one
multiply-add adds both to the sums. Exponentials relative to the tile's largest are stored as one byte each, which holds
the bits of a bfloat16 that vary. Once the sum over all tiles is known, a key's rank takes one or two instructions per
query head.
"""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.launch import count_sms, dependent_launch, group_rows, power_of_two, tile_rows
from sparsekv.kernels.common.tiles_triton import LOG2_E
from sparsekv.kernels.posting_lists import packed_triton as packed
from sparsekv.kernels.posting_lists.list_ranks import BINS, LARGEST, TokenRanks, lowest_rank
from sparsekv.kernels.posting_lists.packed_triton import TO_BYTES
from sparsekv.kernels.posting_lists.posting_lists import HIGHEST, TILE_TOKENS, TILE_WORDS

# Tiles are small and there is one pipeline stage. With more shared memory per program, fewer programs could wait for
# memory at the same time.
EXACT_PROGRAMS, TILE_BYTES, STAGES, WARPS = 4, 8192, 1, 4


@triton.jit
def add_exact(
    query, exact_keys, exact_count, sinks, peaks, totals, head, which, sums, exact_rows, exact_stride, softmax_scale,
    softcap, CAPPED: tl.constexpr, COUNTED: tl.constexpr, HAS_SINKS: tl.constexpr, G: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, EXACT_PROGRAMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the peak logit, in units of log 2, and the sum of exponentials of a program's share of the exact keys.

    `which` is the program's number among the EXACT_PROGRAMS programs of a head. Its results are stored in the last
    EXACT_PROGRAMS of a query head's `sums` places. The first program's share includes the learned sinks.
    """
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    of_group = g < G
    q = tl.load(query + (head * G + g[:, None]) * D + d, mask=of_group[:, None] & (d < D), other=0.0)
    peak = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head * G + g, mask=of_group, other=0.0).to(tl.float32) * LOG2_E
        peak = tl.where(which == 0, sink, peak)
        total = tl.where(which == 0, 1.0, total)
    rows = exact_rows
    if COUNTED:
        rows = tl.minimum(rows, tl.load(exact_count))
    first, stop = common.share(which, EXACT_PROGRAMS, rows)
    for at in range(first, stop, TILE):
        inside = at + t < stop
        place = exact_keys + head * exact_stride + (at + t)[:, None] * D + d
        k = tl.load(place, mask=inside[:, None] & (d < D), other=0.0)
        logits = common.capped(common.dot(q, tl.trans(k)) * softmax_scale, softcap, CAPPED) * LOG2_E
        logits = tl.where(inside, logits, -float("inf"))
        highest = tl.maximum(peak, tl.max(logits, 1))
        total = total * tl.exp2(peak - highest) + tl.sum(tl.exp2(logits - highest[:, None]), 1)
        peak = highest
    place = (head * G + g) * sums + sums - EXACT_PROGRAMS + which
    tl.store(peaks + place, peak, mask=of_group)
    tl.store(totals + place, total, mask=of_group)


@triton.jit(do_not_specialize=["exact_rows"])
def _look_up_kernel(
    query, centroids, channels, origins, steps, part_weights, exact_keys, exact_count, sinks,
    lists, slopes, floors, peaks, totals,
    sums, exact_rows, exact_stride, softmax_scale, softcap, CAPPED: tl.constexpr,
    COUNTED: tl.constexpr, HAS_SINKS: tl.constexpr, REACHING: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    FEW: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, EXACT_PROGRAMS: tl.constexpr,
    TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Find, for a subspace of a head, the list of each query's nearest centroid.

    A key's code in the list contributes slope * code + floor to its logit; write slope and floor, too. The last
    EXACT_PROGRAMS programs of a head process the exact keys instead.
    """
    common.wait_for_previous_kernel(EARLY)
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if part >= PARTS:
        add_exact(
            query, exact_keys, exact_count, sinks, peaks, totals, head, part - PARTS, sums, exact_rows, exact_stride,
            softmax_scale, softcap, CAPPED, COUNTED, HAS_SINKS, G, GROUP, D, BLOCK_D, EXACT_PROGRAMS, TILE,
        )  # fmt: skip
    else:
        g, c, j = tl.arange(0, FEW), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_SIZE)
        channel = tl.load(channels + part * SIZE + j, mask=j < SIZE, other=0)
        of_query = (g < G)[:, None] & (j < SIZE)
        q = tl.load(query + (head * G + g[:, None]) * D + channel, mask=of_query, other=0.0).to(tl.float32)
        place = ((head * PARTS + part) * C + c[:, None]) * SIZE + j
        centroid = tl.load(centroids + place, mask=(c < C)[:, None] & (j < SIZE), other=0.0)
        # Steps and origins of all lists are read, because reading only the values of the nearest list would wait for
        # memory once more.
        place = (head * PARTS + part) * C + c
        step, origin = tl.load(steps + place, mask=c < C, other=0.0), tl.load(origins + place, mask=c < C, other=0.0)
        products = tl.sum(q[:, None, :] * centroid[None, :, :], 2)
        # If products are NaN, the index of the largest could be past the last list.
        known = (c < C) & (products > -float("inf"))
        best, nearest = tl.max(tl.where(known, products, -float("inf")), 1, return_indices=True)
        found = (head * PARTS + part) * C + nearest
        at_nearest = nearest[:, None] == c
        reach = tl.load(part_weights + head * PARTS + part) * softmax_scale
        reach = reach * (tl.maximum(best, 0.0) if REACHING else tl.full([FEW], 1.0, tl.float32))
        place = (head * G + g) * PARTS + part
        tl.store(lists + place, found.to(tl.int32), mask=g < G)
        tl.store(slopes + place, reach * tl.sum(tl.where(at_nearest, step, 0.0), 1), mask=g < G)
        tl.store(floors + place, reach * tl.sum(tl.where(at_nearest, origin, 0.0), 1), mask=g < G)


LOGIT_WARPS = 4
# Warps of `_rank_kernel`. With many programs, it is bound by instructions. Then one warp is best, because each of four
# warps would repeat the work that is common to the program.
WARPS_OF_FEW, WARPS_OF_MANY = 4, 1
TILES_OF_A_PROGRAM = 2  # used if all SMs stay busy: a program then computes a query's scale once for two tiles
MANY = 16  # programs that keep an SM busy
TWO_CODES, NEXT_TWO_CODES = tl.constexpr(0x000F000F), tl.constexpr(0x00F000F0)
BOTH = tl.constexpr(0x00010001)


@triton.jit
def _scale(slopes, floors, PARTS: tl.constexpr, ROOM: tl.constexpr, HIGHEST: tl.constexpr):
    """Compute the scale by which one query's logits become integer sums of weighted codes.

    Returns:
        the factor from a list's slope to the integer weight of its codes; the logit that 1 in a sum stands for; the
        logit of a sum of 0; and the value from which a sum starts, so that negative weights never make it negative.
    """
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
    """Convert an integer sum, passed as float32 plus 2 ** 23, to a logit in units of log 2."""
    return common.capped((number - 8388608.0) * unit + base, softcap, CAPPED) * LOG2_E


@triton.jit
def _weights(word, slope, unit, base, peak, highest, left, softcap, CAPPED: tl.constexpr, WHOLE: tl.constexpr):
    """Compute the exponentials of the two logits in each word, relative to the tile's largest.

    Return them packed in a word, and their sum. `left` is the number of keys from the low logit's key on. The high
    logit's key comes 16 keys later.
    """
    low, high = packed.two_numbers(word)
    if CAPPED:
        low, high = _logit(low, unit, base, softcap, True) - peak, _logit(high, unit, base, softcap, True) - peak
    else:
        # The integers are subtracted before scaling, because this subtraction is exact.
        low, high = (low - highest) * slope, (high - highest) * slope
    low, high = packed.exp2(low), packed.exp2(high)
    if not WHOLE:
        low, high = tl.where(left > 0, low, 0.0), tl.where(left > 16, high, 0.0)
    return packed.pair(low, high), low + high


@triton.jit
def _store_weights(
    a, b, c, d, unit, base, target, peaks, totals, left, softcap, CAPPED: tl.constexpr, WORDS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the `_weights` of a tile's integer sums as bytes, the tile's largest logit, and the sum of the weights."""
    highest = _highest(a, left, WHOLE)
    highest = tl.maximum(highest, _highest(b, left - 8, WHOLE))
    highest = tl.maximum(highest, tl.maximum(_highest(c, left - 1, WHOLE), _highest(d, left - 9, WHOLE)))
    highest = tl.max(highest, 0)
    peak, slope = _logit(highest, unit, base, softcap, CAPPED), unit * LOG2_E
    a, some = _weights(a, slope, unit, base, peak, highest, left, softcap, CAPPED, WHOLE)
    b, of_b = _weights(b, slope, unit, base, peak, highest, left - 8, softcap, CAPPED, WHOLE)
    c, of_c = _weights(c, slope, unit, base, peak, highest, left - 1, softcap, CAPPED, WHOLE)
    d, of_d = _weights(d, slope, unit, base, peak, highest, left - 9, softcap, CAPPED, WHOLE)
    tl.store(target, packed.as_bytes(a, b))
    tl.store(target + WORDS, packed.as_bytes(c, d))
    tl.store(peaks, peak)
    tl.store(totals, tl.sum((some + of_b) + (of_c + of_d), 0))


@triton.jit
def _highest(word, left, WHOLE: tl.constexpr):
    low, high = packed.two_numbers(word)
    if not WHOLE:
        low, high = tl.where(left > 0, low, 8388608.0), tl.where(left > 16, high, 8388608.0)
    return tl.maximum(low, high)


@triton.jit(do_not_specialize=["keys", "tiles"])
def _weights_kernel(
    codes, lists, slopes, floors, weights, peaks, totals, keys, tiles, sums, softcap, CAPPED: tl.constexpr,
    PARTS: tl.constexpr, WORDS: tl.constexpr, ROOM: tl.constexpr, HIGHEST: tl.constexpr, TILES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write the exponentials of one query's logits for some tiles of keys, relative to the tile's largest, as bytes.

    Also write each tile's largest logit, in units of log 2, and its sum of exponentials.
    """
    common.wait_for_previous_kernel(EARLY)
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
        # The sums in `b` and `d` are shifted up by four bits. A sum has at most 12 bits.
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
    one, next_one = packed.between(one, least, most) - least, packed.between(next_one, least, most) - least
    return ((one >> 3) & 0x00FF00FF) | ((next_one << 5) & -16711936)


@triton.jit(do_not_specialize=["least"])
def _rank_kernel(
    weights, peaks, totals, ranks, coarse, logsumexps, least, sums, G: tl.constexpr, FEW: tl.constexpr,
    WORDS: tl.constexpr, SUMS: tl.constexpr, BINS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the ranks of a tile of keys, and count them in bins of 16 ranks."""
    common.wait_for_previous_kernel(EARLY)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    # Heads are processed in reverse order, because the weights written last are still in the cache.
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
    factors = packed.pair(factor, factor)
    a = tl.zeros([WORDS], tl.int32)
    b, c, d = a, a, a
    for group in tl.static_range(G):
        source = weights + ((head * G + group) * tiles + tile) * (2 * WORDS) + w
        one = tl.sum(tl.where(g == group, factors, 0), 0)
        first, second = tl.load(source), tl.load(source + WORDS)
        a, b = packed.add_scaled(a, packed.even_bytes(first), one), packed.add_scaled(b, packed.odd_bytes(first), one)
        c, d = packed.add_scaled(c, packed.even_bytes(second), one), packed.add_scaled(d, packed.odd_bytes(second), one)
    # Scores of the first and the last rank, as pairs of bfloat16. A bfloat16 has three bits more than a rank.
    lowest = (least << 3) * BOTH
    last = lowest + (8 * BINS * BINS - 1) * BOTH
    ab, cd = _four_ranks(a, b, lowest, last), _four_ranks(c, d, lowest, last)
    target = ranks + (head * tiles + tile) * (2 * WORDS) + w
    tl.store(target, ab)
    tl.store(target + WORDS, cd)
    counts = tl.zeros([WORDS], tl.int64)
    for at in tl.static_range(4, 32, 8):
        counts += packed.one_each(ab, at) + packed.one_each(cd, at)
    counts = packed.sums_of_fours(counts, WORDS // 4)
    tl.store(coarse + (head * tiles + tile) * BINS + tl.arange(0, BINS), counts)


def many(programs: int, device: torch.device) -> bool:
    """Whether there are enough programs to keep all SMs busy."""
    return programs >= MANY * count_sms(device)


def rank_tokens_triton(query, lists, exact, wanted, softmax_scale, softcap=None):
    """Run `rank_tokens` on a GPU; reads the lists' codes once, and one byte for each logit."""
    (H, G, D), (_, m, C, size), device = query.shape, lists.centroids.shape, query.device
    query, early, tiles = query.contiguous(), dependent_launch(device), lists.codes.shape[3] // TILE_WORDS
    sums, capped_by = tiles + EXACT_PROGRAMS, {"softcap": softcap or 0.0, "CAPPED": softcap is not None}
    # For each query: the nearest centroids' lists, as indices into the lists of all heads, and the slopes and floors of
    # the logits as functions of codes.
    nearest = torch.empty(H, G, m, dtype=torch.int32, device=device)
    slopes, floors = torch.empty(2, H, G, m, device=device)
    # Largest logits, in units of log 2, and sums of exponentials: one for each tile of keys, then those of exact keys.
    peaks, totals = torch.empty(2, H, G, sums, device=device)
    _look_up_kernel[(m + EXACT_PROGRAMS, H)](
        query, lists.centroids, lists.channels, lists.origins, lists.steps, lists.weights, exact.keys,
        nearest if exact.count is None else exact.count, slopes if exact.sinks is None else exact.sinks.contiguous(),
        nearest, slopes, floors, peaks, totals, sums, exact.keys.shape[1], exact.keys.stride(0), softmax_scale,
        COUNTED=exact.count is not None, HAS_SINKS=exact.sinks is not None, REACHING=lists.reaching, G=G,
        GROUP=group_rows(G), FEW=power_of_two(G), PARTS=m, C=C, BLOCK_C=power_of_two(C), SIZE=size,
        BLOCK_SIZE=power_of_two(size), D=D, BLOCK_D=power_of_two(D),
        EXACT_PROGRAMS=EXACT_PROGRAMS, TILE=tile_rows(D, query.dtype, TILE_BYTES), num_warps=WARPS, num_stages=STAGES,
        # With fused multiply-adds, threads that hold the same sum could round it differently. They store the sum in the
        # same place, so the result would depend on their order.
        enable_fp_fusion=False, **capped_by, **early,
    )  # fmt: skip
    weights = torch.empty(H, G, tiles, TILE_TOKENS // 4, dtype=torch.int32, device=device)
    ranks = torch.empty(H, tiles, 2, TILE_WORDS, dtype=torch.int32, device=device)
    coarse = torch.empty(H, tiles, BINS, dtype=torch.int32, device=device)
    logsumexps = torch.empty(H, G, device=device)
    several = TILES_OF_A_PROGRAM if many(H * G * tiles, device) else 1
    _weights_kernel[(-(-tiles // several), H * G)](
        lists.codes, nearest, slopes, floors, weights, peaks, totals, lists.keys, tiles, sums, PARTS=m,
        WORDS=TILE_WORDS, ROOM=LARGEST // HIGHEST - m, HIGHEST=HIGHEST, TILES=several, num_warps=LOGIT_WARPS,
        **capped_by, **early,
    )  # fmt: skip
    _rank_kernel[(tiles, H)](
        weights, peaks, totals, ranks, coarse, logsumexps, lowest_rank(wanted), sums, G=G,
        FEW=power_of_two(G), WORDS=TILE_WORDS, SUMS=power_of_two(sums), BINS=BINS,
        num_warps=WARPS_OF_MANY if many(tiles * H, device) else WARPS_OF_FEW, **early,
    )  # fmt: skip
    return TokenRanks(ranks, coarse, logsumexps, lists.keys)
