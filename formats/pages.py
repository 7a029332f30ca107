"""Memory pages of mapped files: mapped all at once, and released, because the file still has their content."""

import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator
from functools import cache

import torch

AT_ONCE = 64 << 20
DONTNEED, POPULATE_READ = 4, 22  # MADV_DONTNEED and, since 5.14, MADV_POPULATE_READ of Linux


def release_pages(mapped: torch.Tensor) -> None:
    """Release the memory pages of a tensor, which must be a view of a mapped file and never written to.

    They are read from the file again when they are accessed. A tensor in any other memory would lose its content. Does
    nothing outside Linux.
    """
    _advise(*_whole_pages(mapped), DONTNEED)


def map_pages(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Map all memory pages of tensors that are views of mapped files, a system call and a step for each AT_ONCE bytes.

    Who reads them first would stop for every sixteen pages. Other tensors have theirs already. Does nothing where the
    system cannot; other threads run meanwhile.
    """
    for tensor in tensors:
        first, length = _whole_pages(tensor)
        for start in range(first, first + length, AT_ONCE):
            _advise(start, min(AT_ONCE, first + length - start), POPULATE_READ)
            yield


def _whole_pages(mapped: torch.Tensor) -> tuple[int, int]:
    """Address and length of the whole pages of a tensor's storage."""
    storage = mapped.untyped_storage()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    return first, max(0, end // mmap.PAGESIZE * mmap.PAGESIZE - first)


def _advise(first: int, length: int, advice: int) -> None:
    """Give advice about pages."""
    madvise = _madvise()
    if madvise is not None and length:
        madvise(first, length, advice)


@cache
def _madvise() -> "ctypes._NamedFuncPointer | None":
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
