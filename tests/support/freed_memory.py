"""Reuse of freed memory. By default glibc maps new memory for each large tensor, and the kernel zeroes its pages."""

import ctypes
from contextlib import suppress

KEPT = {-1: 1 << 30, -3: 1 << 25}
"""Bytes of glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, by their numbers in malloc.h; the second is at its
maximum."""


def keep_freed_memory() -> None:
    """Make this process reuse the memory that it has freed; without glibc, do nothing."""
    with suppress(AttributeError):
        change = ctypes.CDLL(None).mallopt
        for parameter, size in KEPT.items():
            assert change(parameter, size) == 1
