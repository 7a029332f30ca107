"""Reading ahead: the next items are read by threads while one is used."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def read_ahead(
    items: Iterable[S], read: Callable[[S], T], count: int, begin: Callable[[], None] = lambda: None
) -> Generator[T, None, None]:
    """Yields `read(item)` for each item, in order, while threads read the next `count` ones.

    Whoever ends before the last item, or is interrupted, does not wait for what has begun.

    Args:
        begin: called once in each thread.
    """
    threads = ThreadPoolExecutor(count, initializer=begin)
    ahead, whole = deque[Future[T]](), False
    try:
        for item in items:
            ahead.append(threads.submit(read, item))
            if len(ahead) > count:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
        whole = True
    finally:
        threads.shutdown(wait=whole, cancel_futures=True)
