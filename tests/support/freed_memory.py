"""Memory of freed tensors, kept: by default each large one is mapped anew, and the kernel zeroes its pages."""

import ctypes
from contextlib import suppress

KEPT = {-1: 1 << 30, -3: 1 << 25}
"""Bytes of glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, by their numbers in malloc.h; the second has no more."""


def keep_freed_memory() -> None:
    """Let this process use again what it has freed; without glibc nothing happens."""
    with suppress(AttributeError):
        change = ctypes.CDLL(None).mallopt
        for parameter, size in KEPT.items():
            assert change(parameter, size) == 1
