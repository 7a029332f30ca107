"""Finds the kernels that numba compiles for a CPU, and whether they take some tensors."""

import ctypes
import importlib
from functools import lru_cache
from types import ModuleType

import torch


@lru_cache
def compiled_kernels(name: str) -> ModuleType | None:
    """A module of this folder that numba compiles, which takes seconds the first time and is read from disk later; None
    without numba, or where the process has no GNU OpenMP, whose threads torch uses."""
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return None
    try:
        return importlib.import_module(f"sparsekv.kernels.attention.{name}")
    except ImportError:
        return None


def have_addresses(*wanted: tuple[torch.Tensor, torch.dtype]) -> bool:
    """Whether tensors have the dtypes that are wanted, lie on the CPU, and are contiguous."""
    return all(tensor.dtype == dtype and tensor.is_contiguous() and tensor.is_cpu for tensor, dtype in wanted)


def in_reach(query: torch.Tensor, *rows: torch.Tensor) -> bool:
    """Whether a query and rows [H, T, D] are float32, of which a head's are contiguous, and no gradient is wanted."""
    if query.dtype != torch.float32 or query.requires_grad:
        return False
    D = query.shape[2]
    return all(held.dtype == torch.float32 and held.stride()[1:] == (D, 1) for held in rows)
