"""Where a growing sequence is cut into blocks that are clustered one by one (Multipole Attention, section 3.3)."""


def block_offsets(tokens: int, block: int) -> list[int]:
    """First token of each block, and the end: closed blocks of W tokens, then one that is still open.

    The open block holds between alpha = W / 2 and W + alpha tokens (fewer only when there are fewer in all): when it
    reaches W + alpha its first W become a closed block. So the cuts depend on the number of tokens alone, however they
    came.

    Args:
        tokens: tokens so far, at least 1.
        block: W, at least 2.
    """
    least_open = block // 2
    closed = max(0, tokens - least_open) // block
    return [*range(0, closed * block + 1, block), tokens]
