"""Work beside the main thread that nobody waits for, and that ends with it."""

from collections.abc import Iterator
from threading import Thread, main_thread


def run_beside(steps: Iterator[object], name: str) -> None:
    """Have a thread run through some steps, as far as it comes before the program ends.

    It is no daemon: Python lets these go on while it ends, and aborts where one is in torch then. So a program that
    ends waits for the step that has begun; each should be short.

    Args:
        steps: does its work as it is iterated, and raises nothing.
        name: the thread's.
    """
    Thread(target=_run, args=[steps], name=name).start()


def _run(steps: Iterator[object]) -> None:
    for _ in steps:
        if not main_thread().is_alive():
            return
