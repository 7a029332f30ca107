"""Tensors whose memory ends, or begins, at a protected page: an access past them is a segmentation fault."""

import ctypes
import mmap

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def fenced(tensor: torch.Tensor, *, behind: bool) -> torch.Tensor:
    """Return a copy, never freed, with a protected page after its last element if `behind`, else before its first."""
    tensor, page = tensor.contiguous(), mmap.PAGESIZE
    size = max(1, tensor.numel()) * tensor.element_size()
    room = -(-size // page) * page
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc.mmap(None, room + 2 * page, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    for fence in (address, address + page + room):
        assert _libc.mprotect(fence, page, 0) == 0
    first = address + page + (room - size if behind else 0)
    memory = (ctypes.c_char * size).from_address(first)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=max(1, tensor.numel()))[: tensor.numel()]
    return copy.view(tensor.shape).copy_(tensor)
