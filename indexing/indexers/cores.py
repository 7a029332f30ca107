"""Sharing a CPU's cores among layers: threads of one operation wait for each other, those of several do not."""

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import torch

from sparsekv.formats.ahead import read_ahead

S = TypeVar("S")
T = TypeVar("T")

MOST = 8
"""Items at a time."""
MOST_TOKENS = 1 << 18
"""Of these items together: each takes memory of its own, some 20 KB a token with `codes` and an 8B's heads."""


def share_cores(
    items: Sequence[S], tokens: int, work: Callable[[S], T], of: int | None = None
) -> Generator[T, None, None]:
    """Yields `work(item)` for each item, in order, several at a time, among which torch's threads are divided.

    Args:
        tokens: that the work on one item is over.
        of: number of items that the threads are divided among, where `items` are only some of them; as many as there
            are by default. Sums depend on the threads of an item, and must not depend on the items that are missing.
    """
    threads = torch.get_num_threads()
    together = max(1, min(threads, MOST, of or len(items), MOST_TOKENS // max(1, tokens)))

    def begin() -> None:
        torch.set_num_threads(threads // together)
        # What a thread may be is its own: the caller may have switched gradients off for itself.
        torch.set_grad_enabled(False)

    try:
        yield from read_ahead(items, work, together, begin)
    finally:
        # A thread of its own sets the number of MKL's threads for all, and torch's for those that begin later.
        torch.set_num_threads(threads)
