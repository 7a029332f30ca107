"""Where a choice by ranks ends, from counts of the ranks, in Triton: each program adds up the counts of all tiles."""

import triton
import triton.language as tl

from sparsekv.kernels.tables.packed_triton import sum_of_four, sum_of_three, sum_of_two


@triton.jit
def sums_of_bins(counts, tile, tiles, BINS: tl.constexpr, ROWS: tl.constexpr):
    """Sums of a head's counts [tiles, BINS] over all tiles, and over the tiles before one: [BINS] each."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BINS)
    every = tl.zeros([BINS], tl.int32)
    before = every
    for at in range(0, tiles, ROWS):
        rows = (at + row)[:, None]
        some = tl.load(counts + rows * BINS + column, mask=rows < tiles, other=0)
        # One reduction, as each makes all threads of a program wait twice.
        of_all, of_these = tl.reduce((some, tl.where(rows < tile, some, 0)), 0, sum_of_two)
        every, before = every + of_all, before + of_these
    return every, before


@triton.jit
def _sums_of_pairs(counts, tile, tiles, FEW_RANKS: tl.constexpr, ROWS: tl.constexpr):
    """The same where each rank is counted by itself, two counts in a word: [FEW_RANKS] each."""
    PAIRS: tl.constexpr = FEW_RANKS // 2
    row, column = tl.arange(0, ROWS), tl.arange(0, PAIRS)
    even, odd, even_before, odd_before = (
        tl.zeros([PAIRS], tl.int32), tl.zeros([PAIRS], tl.int32), tl.zeros([PAIRS], tl.int32),
        tl.zeros([PAIRS], tl.int32),
    )  # fmt: skip
    for at in range(0, tiles, ROWS):
        rows = (at + row)[:, None]
        words = tl.load(counts + rows * PAIRS + column, mask=rows < tiles, other=0)
        before = tl.where(rows < tile, words, 0)
        some = tl.reduce((words & 0xFFFF, words >> 16, before & 0xFFFF, before >> 16), 0, sum_of_four)
        even, odd = even + some[0], odd + some[1]
        even_before, odd_before = even_before + some[2], odd_before + some[3]
    return tl.interleave(even, odd), tl.interleave(even_before, odd_before)


@triton.jit
def last_bin(counts, wanted, BINS: tl.constexpr):
    """The highest bin with `wanted` keys in it or above (0 if there are too few), and how many to take from it."""
    column = tl.arange(0, BINS)
    from_here = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    last = tl.max(tl.where(from_here >= wanted, column, 0), 0)
    return last, wanted - tl.sum(tl.where(column > last, counts, 0), 0)


@triton.jit
def _bounds(coarse, fine, wanted, tile, tiles, BINS: tl.constexpr, ROWS: tl.constexpr):
    """The last rank that is chosen in a head, how many keys of the tiles before one are chosen, and how many of
    the last rank are still to be taken from there on."""
    every, before = sums_of_bins(coarse, tile, tiles, BINS, ROWS)
    last_coarse, left = last_bin(every, wanted, BINS)
    fine_every, fine_before = sums_of_bins(fine, tile, tiles, BINS, ROWS)
    last_fine, room = last_bin(fine_every, left, BINS)
    column = tl.arange(0, BINS)
    first = tl.sum(tl.where(column > last_coarse, before, 0) + tl.where(column > last_fine, fine_before, 0), 0)
    equal_before = tl.sum(tl.where(column == last_fine, fine_before, 0), 0)
    first += tl.minimum(equal_before, room)
    return last_coarse * BINS + last_fine, first, tl.maximum(room - equal_before, 0)


@triton.jit
def _bounds_of_few(counts, wanted, tile, tiles, FEW_RANKS: tl.constexpr, ROWS: tl.constexpr):
    """The same where each rank is counted by itself."""
    every, before = _sums_of_pairs(counts, tile, tiles, FEW_RANKS, ROWS)
    column = tl.arange(0, FEW_RANKS)
    last = tl.max(tl.where(tl.cumsum(every, 0, reverse=True) >= wanted, column, 0), 0)
    above, first, equal_before = tl.reduce(
        (tl.where(column > last, every, 0), tl.where(column > last, before, 0), tl.where(column == last, before, 0)),
        0, sum_of_three,
    )  # fmt: skip
    room = wanted - above
    return last, first + tl.minimum(equal_before, room), tl.maximum(room - equal_before, 0)


@triton.jit
def bounds_of(coarse, fine, head, wanted, tile, tiles, FEW_RANKS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr):
    """The bounds of a head, by counts of each rank, of which there are FEW_RANKS, or of bins and of one bin's ranks."""
    if FEW_RANKS:
        bounds = _bounds_of_few(coarse + head * tiles * (FEW_RANKS // 2), wanted, tile, tiles, FEW_RANKS, ROWS)
    else:
        bounds = _bounds(coarse + head * tiles * BINS, fine + head * tiles * BINS, wanted, tile, tiles, BINS, ROWS)
    return bounds
