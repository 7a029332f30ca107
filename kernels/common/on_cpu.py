"""Compiled kernels of a CPU: numba modules, and the threads of torch that run them."""

import ctypes
import importlib
import sys
import time
from functools import lru_cache
from types import ModuleType
from typing import Any

_took: list[float] = []


@lru_cache
def threads_of_torch() -> Any:
    """Return `GOMP_parallel`, the GNU OpenMP function that runs a function on all of torch's threads.

    Return None where the process does not use GNU OpenMP.
    """
    call = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if call is not None:
        call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return call


@lru_cache
def compiled_kernels(name: str, folder: str = "attention") -> ModuleType | None:
    """Import the numba module `sparsekv.kernels.FOLDER.NAME`; return None without numba or without GNU OpenMP.

    None is also returned if numba's compiler is switched off. The first import on a machine compiles the module, which
    takes seconds. Later processes read the machine code from numba's cache folder, if that folder is writable.
    """
    if threads_of_torch() is None:
        return None
    module, started = f"sparsekv.kernels.{folder}.{name}", time.perf_counter()
    importing = module in sys.modules  # another thread imports the module, and counts the time
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    if not found.STEP.cache_hits and not importing:
        _took.append(time.perf_counter() - started)
    return found


def compiling_took() -> float:
    """Return the seconds spent on compiling kernels since the last call of this function; 0 if none was compiled."""
    seconds = sum(_took)
    _took.clear()
    return seconds
