"""Cuts a growing sequence into blocks that are clustered separately (Multipole Attention, section 3.3)."""

from itertools import pairwise


def block_offsets(tokens: int, block: int) -> list[int]:
    """First token of each block, and the end of the last: closed blocks of W tokens, then an open one.

    The open block has between alpha = W / 2 and W + alpha tokens (fewer only if the sequence is shorter): when it
    reaches W + alpha, its first W tokens become a closed block. So the cuts depend only on the number of tokens, not on
    how they were appended.

    Args:
        tokens: length of the sequence, at least 1.
        block: W, at least 2.
    """
    least_open = block // 2
    closed = max(0, tokens - least_open) // block
    return [*range(0, closed * block + 1, block), tokens]


def equal_neighbours(offsets: list[int], most: int) -> list[list[int]]:
    """The offsets of neighbouring blocks of one length, of up to `most` tokens together, or of one block."""
    runs: list[list[int]] = []
    for start, stop in pairwise(offsets):
        if runs and stop - start == runs[-1][1] - runs[-1][0] and stop - runs[-1][0] <= most:
            runs[-1].append(stop)
        else:
            runs.append([start, stop])
    return runs
