"""Finds the kernels that numba compiles for a CPU, and whether they take some tensors."""

import ctypes
import importlib
import time
from functools import lru_cache
from types import ModuleType

import torch

_took: list[float] = []


@lru_cache
def compiled_kernels(name: str) -> ModuleType | None:
    """A module of this folder that numba compiles, which takes seconds the first time and is read from disk later; None
    without numba, or where the process has no GNU OpenMP, whose threads torch uses."""
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return None
    started = time.perf_counter()
    try:
        found = importlib.import_module(f"sparsekv.kernels.attention.{name}")
    except ImportError:
        return None
    if not found.STEP.cache_hits:
        _took.append(time.perf_counter() - started)
    return found


def compiling_took() -> float:
    """Seconds since the last call in which kernels were compiled; 0 where they were read from disk."""
    seconds = sum(_took)
    _took.clear()
    return seconds


def have_addresses(*wanted: tuple[torch.Tensor, torch.dtype]) -> bool:
    """Whether tensors have the dtypes that are wanted, lie on the CPU, and are contiguous."""
    return all(tensor.dtype == dtype and tensor.is_contiguous() and tensor.is_cpu for tensor, dtype in wanted)


def in_reach(query: torch.Tensor, *rows: torch.Tensor) -> bool:
    """Whether a query and rows [H, T, D] are float32, of which a head's are contiguous, and no gradient is wanted."""
    if query.dtype != torch.float32 or query.requires_grad:
        return False
    D = query.shape[2]
    return all(held.dtype == torch.float32 and held.stride()[1:] == (D, 1) for held in rows)
