"""Reading ahead: the next items are read by threads while one is used."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def read_ahead(
    items: Iterable[S], read: Callable[[S], T], count: int, begin: Callable[[], None] = lambda: None
) -> Iterator[T]:
    """Yields `read(item)` for each item, in order, while threads read the next `count` ones.

    Args:
        begin: called once in each thread.
    """
    with ThreadPoolExecutor(count, initializer=begin) as threads:
        ahead: deque[Future[T]] = deque()
        try:
            for item in items:
                ahead.append(threads.submit(read, item))
                if len(ahead) > count:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
