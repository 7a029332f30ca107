"""`top_ranked` in Triton: every program sums the counts of ranks itself, and finds the last rank that is chosen."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common.launch import count_sms, dependent_launch
from sparsekv.kernels.common.tiles_triton import power_of_two, prefetch, wait_for_previous_kernel
from sparsekv.kernels.tables.list_codes import TILE_WORDS
from sparsekv.kernels.tables.packed_triton import one_each, set_bits, store_words, sums_of_fours
from sparsekv.kernels.tables.rank_bounds_triton import bounds_of, last_bin, sums_of_bins
from sparsekv.kernels.tables.types import BINS, FEW_RANKS, KeyGroups, TokenRanks

FEWEST_ROWS, MOST_ROWS = 32, 128  # of counts that a program adds up at a time: all wait for memory together
# Many programs are bound by instructions: one warp runs once what is common to a program, four run it each. Where there
# are most, two count faster than one: measured, one warp takes 50% longer there, four take 20% longer.
WARPS_OF_FEW, WARPS_OF_MANY, COUNT_WARPS_OF_MOST = 4, 1, 2
COUNTED_WARPS_OF_MANY = 2  # where each rank is counted: twice as many counts to add up
MANY, MOST = 4, 16  # programs for each SM
TOP_BITS = tl.constexpr(-2139062144)  # 0x80808080: the top bit of each byte
ONES = tl.constexpr(0x01010101)


@triton.jit(do_not_specialize=["wanted"])
def _count_kernel(
    ranks, coarse, fine, wanted, WORDS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr
):
    """Count a tile's keys by rank within the coarse bin that holds the last chosen rank."""
    wait_for_previous_kernel(EARLY)
    tile, tiles, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    place = ranks + (head * tiles + tile) * (2 * WORDS) + tl.arange(0, WORDS)
    words, next_words = tl.load(place), tl.load(place + WORDS)
    every, _ = sums_of_bins(coarse + head * tiles * BINS, 0, tiles, BINS, ROWS)
    last, _ = last_bin(every, wanted, BINS)
    counts = tl.zeros([WORDS], tl.int64)
    for at in tl.static_range(0, 32, 8):
        counts += tl.where(((words >> at) & 0xF0) == 16 * last, one_each(words, at), 0)
        counts += tl.where(((next_words >> at) & 0xF0) == 16 * last, one_each(next_words, at), 0)
    counts = sums_of_fours(counts, WORDS // 4)
    tl.store(fine + (head * tiles + tile) * BINS + tl.arange(0, BINS), counts)


@triton.jit
def _at_least(words, bound):
    """Words with the top bit set of each byte that is at least `bound`, 0 to 256, and no other bits."""
    low_bits_are = (words | TOP_BITS) - (bound & 127) * ONES
    found = tl.where(bound < 128, low_bits_are | words, low_bits_are & words)
    return tl.where(bound < 256, found & TOP_BITS, 0)


@triton.jit
def _marks(words, next_words, bound, QUADS: tl.constexpr):
    """One word for each 32 keys, in the order of the keys, with a bit set for each rank of at least `bound`."""
    shift = 2 * (tl.arange(0, 4 * QUADS) % 4)
    found, of_next = _at_least(words, bound), _at_least(next_words, bound)
    both = ((found >> 7) & ONES) | ((of_next >> 6) & (2 * ONES))
    return tl.sum(tl.reshape(both << shift, [QUADS, 4]), 1)


@triton.jit
def _first_of(marks, number):
    """Words with only their lowest `number` set bits kept."""
    kept = tl.zeros_like(marks)
    for at in range(tl.max(number, 0)):
        lowest = marks & -marks
        kept |= tl.where(at < number, lowest, 0)
        marks ^= lowest
    return kept


@triton.jit
def _write_at_once(taken, slot, named, of_key, labels, chosen, counts, NAMED: tl.constexpr, GROUPED: tl.constexpr):
    """Write the keys whose bits are set from each word's slot on, all at the same time; count their groups."""
    bit = tl.arange(0, 32)[None, :]
    mask = ((taken[:, None] >> bit) & 1) != 0
    place = slot[:, None] + set_bits(taken[:, None] & ((1 << bit) - 1))
    store_words(chosen + place, named, mask)
    if GROUPED:
        group = tl.load(labels + named, mask=mask, other=0) if NAMED else of_key
        tl.atomic_add(counts + group.to(tl.int32), 1, mask=mask, sem="relaxed")


@triton.jit
def _write_in_turn(taken, number, slot, token, names, labels, chosen, counts, NAMED: tl.constexpr,
                   GROUPED: tl.constexpr):  # fmt: skip
    """The same, one key of each word at a time: fewer instructions, each of which waits for memory."""
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
    """Write the chosen keys of a tile, after those of the tiles before it."""
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
            prefetch(labels + tile * (8 * WORDS), keys - tile * (8 * WORDS), 8 * WORDS, SIZE, EARLY)
    wait_for_previous_kernel(EARLY)
    if NAMED and AT_ONCE:
        named = tl.load(names + key, mask=key < keys, other=0)
    place = ranks + (head * tiles + tile) * (2 * WORDS) + tl.arange(0, WORDS)
    words, next_words = tl.load(place), tl.load(place + WORDS)
    last, first, room = bounds_of(coarse, fine, head, wanted, tile, tiles, FEW_RANKS, BINS, ROWS)
    taken = _marks(words, next_words, last + 1, QUADS)
    equal = _marks(words, next_words, last, QUADS) ^ taken
    equals = set_bits(equal)
    taking = tl.minimum(tl.maximum(room - (tl.cumsum(equals, 0) - equals), 0), equals)
    # Nearly all words take all of their equal keys, or none.
    taken |= tl.where(taking == equals, equal, 0) | _first_of(equal, tl.where(taking == equals, 0, taking))
    number = set_bits(taken)
    slot = tl.cumsum(number, 0) - number
    chosen, counts = chosen + head * wanted + first, taken_of + head * groups
    if AT_ONCE:
        _write_at_once(taken, slot, named, of_key, labels, chosen, counts, NAMED, GROUPED)
    else:
        _write_in_turn(taken, number, slot, token, names, labels, chosen, counts, NAMED, GROUPED)


def top_ranked_triton(
    ranked: TokenRanks, wanted: int, names: torch.Tensor | None = None, groups: KeyGroups | None = None
) -> torch.Tensor:
    """`top_ranked` on a GPU; reads the ranks twice, or once where each is counted."""
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
