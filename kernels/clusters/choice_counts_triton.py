"""Sums over the parts of a head's clusters, and the last place that a budget reaches in them, for Triton.

Several sums go in one reduction: each one by itself would wait for all threads of a program, twice.
"""

import triton
import triton.language as tl

# After a part's counts, of tokens and of members where these differ, room for three numbers more: rows of no multiple
# of 4, for what is loaded four at a time has to be laid out anew before it is added up.
LIMITS = tl.constexpr(3)


@triton.jit
def sum_of_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_of_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def sum_of_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def sums_and_largest(a, b, c, d, e, f):
    return a + d, b + e, tl.maximum(c, f)


@triton.jit
def later(place, a, b, c, d, e, other, f, g, h, i, j):
    """Of two places the later one, and what belongs to it."""
    here = place > other
    a, b, c = tl.where(here, a, f), tl.where(here, b, g), tl.where(here, c, h)
    return tl.maximum(place, other), a, b, c, tl.where(here, d, i), tl.where(here, e, j)


@triton.jit
def by_place(place, size, number, SIZE: tl.constexpr, OPEN: tl.constexpr):
    """[SIZE] how much of sizes is at each place, and then [SIZE] how much of numbers, if these are others."""
    column = tl.arange(0, 2 * SIZE if OPEN else SIZE)[None, :]
    amount = tl.where(column < SIZE, size[:, None], number[:, None]) if OPEN else size[:, None]
    return tl.sum(tl.where(place[:, None] == column % SIZE, amount, 0), 0)


@triton.jit
def counted(counts, head, part, others, SIZE: tl.constexpr, PARTS: tl.constexpr, OPEN: tl.constexpr):
    """[SIZE] each: the sizes that all parts of a head have counted, and those before one; the same of numbers."""
    other = tl.arange(0, PARTS)[:, None]
    row: tl.constexpr = (2 * SIZE if OPEN else SIZE) + LIMITS
    place = counts + (head * others + other) * row + tl.arange(0, SIZE)[None, :]
    sizes = tl.load(place, mask=other < others, other=0)
    before = tl.where(other < part, sizes, 0)
    if OPEN:
        numbers = tl.load(place + SIZE, mask=other < others, other=0)
        numbers_before = tl.where(other < part, numbers, 0)
        sizes, before, numbers, numbers_before = tl.reduce((sizes, before, numbers, numbers_before), 0, sum_of_four)
    else:
        sizes, before = tl.reduce((sizes, before), 0, sum_of_two)
        numbers, numbers_before = sizes, before
    return sizes, before, numbers, numbers_before


@triton.jit
def last_place(
    sizes, before, numbers, numbers_before, held, had, budget, wanted, SIZE: tl.constexpr, OPEN: tl.constexpr
):
    """The last place that is taken, the first where there is not enough; what all places above it hold and have, with
    what is above all of them; and of the parts before one the members above it, those at it, and what these hold."""
    place = tl.arange(0, SIZE)
    if OPEN:
        from_here, numbers_from_here, before_from_here = tl.associative_scan(
            (sizes, numbers, numbers_before), 0, sum_of_three, reverse=True
        )
        enough = (held + from_here >= budget) & (had + numbers_from_here >= wanted)
    else:
        from_here, before_from_here = tl.associative_scan((sizes, numbers_before), 0, sum_of_two, reverse=True)
        numbers_from_here, enough = from_here, held + from_here >= budget
    above, numbers_above = from_here - sizes, numbers_from_here - numbers
    found = tl.where(enough | (place == 0), place, -1)
    last, above, numbers_above, before_above, equal, equal_size = tl.reduce(
        (found, above, numbers_above, before_from_here - numbers_before, numbers_before, before), 0, later
    )
    return last, held + above, had + numbers_above, before_above, equal, equal_size
