"""`rank_rows` and `top_ranked` in Triton: logits of scattered rows, their ranks and counts, and the best keys."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.launch import count_sms, dependent_launch, group_rows, num_splits, power_of_two, tile_rows
from sparsekv.kernels.common.tiles_triton import LOG2_E
from sparsekv.kernels.posting_lists import packed_triton as packed
from sparsekv.kernels.posting_lists.list_ranks import BINS, FEW_RANKS, FRACTION_BITS, RANKS, TokenRanks, lowest_rank
from sparsekv.kernels.posting_lists.posting_lists import TILE_TOKENS, TILE_WORDS

PROGRAMS_PER_SM = 4
TILE_BYTES, STAGES, WARPS, RANK_WARPS = 16_384, 3, 4, 8


@triton.jit(do_not_specialize=["slots"])
def _row_logits_kernel(
    query, keys, rows, logits, peaks, totals, slots, stride, head_stride, row_stride, softmax_scale, softcap,
    CAPPED: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the logits of a program's share of a head's rows, in units of log 2.

    Also write their peak and their sum of exponentials.
    """
    common.wait_for_previous_kernel(EARLY)
    part, parts, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    of_group = g < G
    q = tl.load(query + (head * G + g[:, None]) * D + d, mask=of_group[:, None] & (d < D), other=0.0)
    peak = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    first, stop = common.share(part, parts, slots)
    for at in tl.range(first, stop, TILE, num_stages=STAGES):
        inside = at + t < stop
        row = tl.load(rows + head * slots + at + t, mask=inside, other=0)
        place = keys + head * head_stride + row[:, None] * row_stride + d
        # The dtype of an index's keys may differ from that of the model's queries.
        k = tl.load(place, mask=inside[:, None] & (d < D), other=0.0).to(q.dtype)
        some = common.capped(common.dot(q, tl.trans(k)) * softmax_scale, softcap, CAPPED) * LOG2_E
        tl.store(logits + (head * G + g[:, None]) * stride + at + t, some, mask=of_group[:, None] & inside)
        some = tl.where(inside, some, -float("inf"))
        highest = tl.maximum(peak, tl.max(some, 1))
        total = total * tl.exp2(peak - highest) + tl.sum(tl.exp2(some - highest[:, None]), 1)
        peak = highest
    place = (head * G + g) * parts + part
    tl.store(peaks + place, peak, mask=of_group)
    tl.store(totals + place, total, mask=of_group)


@triton.jit
def _row_logsumexps(peaks, totals, estimated, place, parts, PARTS: tl.constexpr):
    """Compute a query head's log-sum-exp over the rows, and the larger of it and the estimate, in units of log 2.

    `place` is the query head's index.
    """
    s = tl.arange(0, PARTS)
    part_peaks = tl.load(peaks + place * parts + s, mask=s < parts, other=-float("inf"))
    part_totals = tl.load(totals + place * parts + s, mask=s < parts, other=0.0)
    peak = tl.max(part_peaks, 0)
    of_rows = peak + tl.log2(tl.sum(part_totals * tl.exp2(part_peaks - peak), 0))
    return of_rows, tl.maximum(of_rows, tl.load(estimated + place) * LOG2_E)


@triton.jit(do_not_specialize=["slots", "parts", "least"])
def _row_rank_kernel(
    logits, peaks, totals, estimated, ranks, coarse, logsumexps, slots, stride, parts, least, G: tl.constexpr,
    SLOTS: tl.constexpr, PARTS: tl.constexpr, FRACTION_BITS: tl.constexpr, RANKS: tl.constexpr, BINS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the ranks of a tile of slots in the layout of `TokenRanks`, and count them in bins of 16 ranks."""
    common.wait_for_previous_kernel(EARLY)
    tile, tiles, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, SLOTS)
    slot = tile * SLOTS + i
    score = tl.zeros([SLOTS], tl.float32)
    excess = float("inf")
    for g in tl.static_range(G):
        of_rows, logsumexp = _row_logsumexps(peaks, totals, estimated, head * G + g, parts, PARTS)
        excess = tl.minimum(excess, logsumexp - of_rows)
    for g in tl.static_range(G):
        _, logsumexp = _row_logsumexps(peaks, totals, estimated, head * G + g, parts, PARTS)
        if tile == 0:
            tl.store(logsumexps + head * G + g, logsumexp / LOG2_E)
        at = logits + (head * G + g) * stride + slot
        score += packed.exp2(tl.load(at, mask=slot < slots, other=-float("inf")) - (logsumexp - excess))
    rank = ((score / G).to(tl.int32, bitcast=True) >> (23 - FRACTION_BITS)) - least
    rank = tl.minimum(tl.maximum(rank, 0), RANKS - 1)
    by_byte = tl.reshape(rank << (8 * (i // 8 % 4)), [SLOTS // 32, 4, 8])
    words = tl.reshape(tl.sum(by_byte, 1), [SLOTS // 4])
    w = tl.arange(0, SLOTS // 4)
    row, word = w % 2, w // 2
    tl.store(ranks + ((head * tiles + tile) * 2 + row) * (SLOTS // 8) + word, words)
    tl.store(coarse + (head * tiles + tile) * BINS + tl.arange(0, BINS), tl.histogram(rank // BINS, BINS))


def rank_rows_triton(query, keys, rows, logsumexp, wanted, softmax_scale, softcap=None):
    """Run `rank_rows` on a GPU; reads the rows' keys once."""
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


FEWEST_ROWS, MOST_ROWS = 32, 128  # fewest and most rows of counts that a program loads at once
# From MANY programs per SM on, the kernels are bound by instructions. One warp per program is then best, because each
# of four warps would repeat the work that is common to a program. From MOST programs per SM on, `_count_kernel` is
# fastest with two warps: as measured, one warp takes 50% longer, and four take 20% longer.
WARPS_OF_FEW, WARPS_OF_MANY, COUNT_WARPS_OF_MOST = 4, 1, 2
COUNTED_WARPS_OF_MANY = 2  # for `_place_kernel`, if each rank has a count: it then sums twice as many counts
MANY, MOST = 4, 16  # programs per SM
TOP_BITS = tl.constexpr(-2139062144)  # 0x80808080: the top bit of each byte
ONES = tl.constexpr(0x01010101)


@triton.jit(do_not_specialize=["wanted"])
def _count_kernel(
    ranks, coarse, fine, wanted, WORDS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr
):
    """Count a tile's keys by rank within the coarse bin that holds the last chosen rank."""
    common.wait_for_previous_kernel(EARLY)
    tile, tiles, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    place = ranks + (head * tiles + tile) * (2 * WORDS) + tl.arange(0, WORDS)
    words, next_words = tl.load(place), tl.load(place + WORDS)
    every, _ = packed.sums_of_bins(coarse + head * tiles * BINS, 0, tiles, BINS, ROWS)
    last, _ = packed.last_bin(every, wanted, BINS)
    counts = tl.zeros([WORDS], tl.int64)
    for at in tl.static_range(0, 32, 8):
        counts += tl.where(((words >> at) & 0xF0) == 16 * last, packed.one_each(words, at), 0)
        counts += tl.where(((next_words >> at) & 0xF0) == 16 * last, packed.one_each(next_words, at), 0)
    counts = packed.sums_of_fours(counts, WORDS // 4)
    tl.store(fine + (head * tiles + tile) * BINS + tl.arange(0, BINS), counts)


@triton.jit
def _at_least(words, bound):
    """Set the top bit of each byte that is at least `bound`, which is 0 to 256, and clear all other bits."""
    low_bits_are = (words | TOP_BITS) - (bound & 127) * ONES
    found = tl.where(bound < 128, low_bits_are | words, low_bits_are & words)
    return tl.where(bound < 256, found & TOP_BITS, 0)


@triton.jit
def _marks(words, next_words, bound, QUADS: tl.constexpr):
    """Return a word for each 32 keys, with a bit for each key in order, set if the key's rank is at least `bound`."""
    shift = 2 * (tl.arange(0, 4 * QUADS) % 4)
    found, of_next = _at_least(words, bound), _at_least(next_words, bound)
    both = ((found >> 7) & ONES) | ((of_next >> 6) & (2 * ONES))
    return tl.sum(tl.reshape(both << shift, [QUADS, 4]), 1)


@triton.jit
def _first_of(marks, number):
    """Keep only the lowest `number` set bits of each word."""
    kept = tl.zeros_like(marks)
    for at in range(tl.max(number, 0)):
        lowest = marks & -marks
        kept |= tl.where(at < number, lowest, 0)
        marks ^= lowest
    return kept


@triton.jit
def _write_at_once(taken, slot, named, of_key, labels, chosen, counts, NAMED: tl.constexpr, GROUPED: tl.constexpr):
    """Write the keys whose bits are set in `taken`, all at the same time; with GROUPED, count them by group.

    Each word of `taken` has the bits of 32 consecutive keys. The keys of a word go to the slots from `slot` on.
    """
    bit = tl.arange(0, 32)[None, :]
    mask = ((taken[:, None] >> bit) & 1) != 0
    place = slot[:, None] + packed.set_bits(taken[:, None] & ((1 << bit) - 1))
    packed.store_words(chosen + place, named, mask)
    if GROUPED:
        group = tl.load(labels + named, mask=mask, other=0) if NAMED else of_key
        tl.atomic_add(counts + group.to(tl.int32), 1, mask=mask, sem="relaxed")


@triton.jit
def _write_in_turn(taken, number, slot, token, names, labels, chosen, counts, NAMED: tl.constexpr,
                   GROUPED: tl.constexpr):  # fmt: skip
    """Write and count keys like `_write_at_once`, but one key of each word at a time; each word has `number` keys.

    This takes fewer instructions, but each step waits for memory.
    """
    for _ in range(tl.max(number, 0)):
        lowest = taken & -taken
        # The exponent of a power of two is the index of its bit.
        bit = (lowest.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        name = tl.load(names + token + bit, mask=taken != 0) if NAMED else token + bit
        tl.store(chosen + slot, name, mask=taken != 0)
        if GROUPED:
            group = tl.load(labels + name, mask=taken != 0).to(tl.int32)
            tl.atomic_add(counts + group, 1, mask=taken != 0, sem="relaxed")
        taken ^= lowest
        slot += 1


@triton.jit(do_not_specialize=["wanted", "keys"])
def _place_kernel(
    ranks, coarse, fine, names, labels, taken_of, chosen, wanted, keys, labels_stride, groups, NAMED: tl.constexpr,
    GROUPED: tl.constexpr, AT_ONCE: tl.constexpr, WORDS: tl.constexpr, BINS: tl.constexpr, FEW_RANKS: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the chosen keys of a tile, after the chosen keys of earlier tiles; with GROUPED, count them by group."""
    tile, tiles, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    QUADS: tl.constexpr = WORDS // 4
    token = tile * (8 * WORDS) + 32 * tl.arange(0, QUADS)
    key = token[:, None] + tl.arange(0, 32)[None, :]
    named, of_key = key, key
    labels, names = labels + head * labels_stride, names + head * keys
    if GROUPED and not NAMED:
        if AT_ONCE:
            of_key = tl.load(labels + key, mask=key < keys, other=0)
        else:
            SIZE: tl.constexpr = labels.dtype.element_ty.primitive_bitwidth // 8
            common.prefetch(labels + tile * (8 * WORDS), keys - tile * (8 * WORDS), 8 * WORDS, SIZE, EARLY)
    common.wait_for_previous_kernel(EARLY)
    if NAMED and AT_ONCE:
        named = tl.load(names + key, mask=key < keys, other=0)
    place = ranks + (head * tiles + tile) * (2 * WORDS) + tl.arange(0, WORDS)
    words, next_words = tl.load(place), tl.load(place + WORDS)
    last, first, room = packed.bounds_of(coarse, fine, head, wanted, tile, tiles, FEW_RANKS, BINS, ROWS)
    taken = _marks(words, next_words, last + 1, QUADS)
    equal = _marks(words, next_words, last, QUADS) ^ taken
    equals = packed.set_bits(equal)
    taking = tl.minimum(tl.maximum(room - (tl.cumsum(equals, 0) - equals), 0), equals)
    # Nearly all words take either all of their keys of the last rank, or none. `_first_of` handles the others.
    taken |= tl.where(taking == equals, equal, 0) | _first_of(equal, tl.where(taking == equals, 0, taking))
    number = packed.set_bits(taken)
    slot = tl.cumsum(number, 0) - number
    chosen, counts = chosen + head * wanted + first, taken_of + head * groups
    if AT_ONCE:
        _write_at_once(taken, slot, named, of_key, labels, chosen, counts, NAMED, GROUPED)
    else:
        _write_in_turn(taken, number, slot, token, names, labels, chosen, counts, NAMED, GROUPED)


def top_ranked_triton(ranked, wanted, names=None, groups=None):
    """Run `top_ranked` on a GPU; reads the ranks twice, or once if each rank has a count."""
    (H, tiles, _), ranks, early = ranked.coarse.shape, ranked.ranks, dependent_launch(ranked.ranks.device)
    chosen = torch.empty(H, wanted, dtype=torch.int32, device=ranks.device)
    of_each, few = tiles * H / count_sms(ranks.device), ranked.each_counted()
    many, most = of_each >= MANY, MOST_ROWS // 2 if few else MOST_ROWS
    warps = (COUNTED_WARPS_OF_MANY if few else WARPS_OF_MANY) if many else WARPS_OF_FEW
    sizes = {"WORDS": TILE_WORDS, "BINS": BINS, "ROWS": min(max(power_of_two(tiles), FEWEST_ROWS), most)}
    fine = ranked.coarse
    if not few:
        fine = torch.empty_like(ranked.coarse)
        count_warps = COUNT_WARPS_OF_MOST if of_each >= MOST else warps
        _count_kernel[(tiles, H)](ranks, ranked.coarse, fine, wanted, num_warps=count_warps, **sizes, **early)
    labels, taken = (chosen, chosen) if groups is None else (groups.labels, groups.taken)
    _place_kernel[(tiles, H)](
        ranks, ranked.coarse, fine, chosen if names is None else names, labels, taken, chosen, wanted, ranked.keys,
        labels.stride(0), taken.shape[1], NAMED=names is not None, GROUPED=groups is not None, AT_ONCE=not many,
        FEW_RANKS=FEW_RANKS if few else 0, num_warps=warps, **sizes, **early,
    )  # fmt: skip
    return chosen
