"""Memory pages of mapped files, which a process can release because the file still has their content."""

import ctypes
import mmap
import sys
from functools import cache

import torch

DONTNEED = 4  # MADV_DONTNEED of Linux


def release_pages(mapped: torch.Tensor) -> None:
    """Release the memory pages of a tensor, which must be a view of a mapped file and never written to.

    They are read from the file again when they are accessed. A tensor in any other memory would lose its content. Does
    nothing outside Linux.
    """
    madvise = _madvise()
    if madvise is None:
        return
    storage = mapped.untyped_storage()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        madvise(first, length, DONTNEED)


@cache
def _madvise() -> "ctypes._NamedFuncPointer | None":
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
