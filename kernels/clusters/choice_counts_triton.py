"""Counts of a head's clusters by place, and the last place that a budget reaches, for Triton.

A place is a bin of ranks; sizes count tokens, numbers count members (children, for clusters to open). Several sums
share one reduction, because each reduction makes all threads of a program wait twice.
"""

import triton
import triton.language as tl

# Numbers after a part's counts. Three, so that row lengths are no multiple of 4: loads four wide would have to be laid
# out anew before they are summed.
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
    """The later of two places, with the values that belong to it."""
    here = place > other
    a, b, c = tl.where(here, a, f), tl.where(here, b, g), tl.where(here, c, h)
    return tl.maximum(place, other), a, b, c, tl.where(here, d, i), tl.where(here, e, j)


@triton.jit
def by_place(place, size, number, SIZE: tl.constexpr, OPEN: tl.constexpr):
    """Sum of sizes at each place [SIZE], followed with OPEN by the sum of numbers at each place [SIZE]."""
    column = tl.arange(0, 2 * SIZE if OPEN else SIZE)[None, :]
    amount = tl.where(column < SIZE, size[:, None], number[:, None]) if OPEN else size[:, None]
    return tl.sum(tl.where(place[:, None] == column % SIZE, amount, 0), 0)


@triton.jit
def counted(counts, head, part, others, SIZE: tl.constexpr, PARTS: tl.constexpr, OPEN: tl.constexpr):
    """Sizes at each place summed over all parts of a head, and over the parts before one; the same for numbers; [SIZE]
    each."""
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
    """The last place that is taken, 0 if the budget is not reached; tokens and members above it, plus `held` and `had`;
    and of the parts before one, the members above it, the members at it, and the tokens at it."""
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
