"""Sharing a CPU's cores among layers: threads of one operation wait for each other, those of several do not."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from sparsekv.formats.ahead import read_ahead

S = TypeVar("S")
T = TypeVar("T")

MOST = 4
"""Items at a time, each of which takes memory of its own."""


def share_cores(items: Iterable[S], work: Callable[[S], T]) -> Iterator[T]:
    """Yields `work(item)` for each item, in order; up to `MOST` at a time, among which torch's threads are divided."""
    threads = torch.get_num_threads()
    together = min(threads, MOST)
    try:
        yield from read_ahead(items, work, together, lambda: torch.set_num_threads(threads // together))
    finally:
        # A thread of its own sets the number of MKL's threads for all, and torch's for those that begin later.
        torch.set_num_threads(threads)
