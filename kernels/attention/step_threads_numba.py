"""Runs a compiled step on torch's own threads, because threads of another pool would wait for cores on which torch's
still spin: OpenMP passes a record of addresses, the job, to the compiled function on each thread."""

import ctypes
import zlib
from pathlib import Path

from numba import cfunc, config, njit, types

from sparsekv.kernels.attention.step_rows_numba import SUMS

if config.DISABLE_JIT:
    raise ImportError("numba is told by its environment not to compile")

thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
thread_count = types.ExternalFunction("omp_get_num_threads", types.int32())
wait_for_all = types.ExternalFunction("GOMP_barrier", types.void())


@njit(inline="always")
def share_of(before, some, everything, thread, threads):
    """Start and stop of a thread's part of `some` items after `before` others, if `everything` is split evenly."""
    start, stop = thread * everything // threads - before, (thread + 1) * everything // threads - before
    return min(max(start, 0), some), min(max(stop, 0), some)


def sources(folder: Path) -> int:
    """Checksum of the compiled files of a folder."""
    checksum = 0
    for path in sorted(folder.glob("*_numba.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return checksum


VERSION = sources(Path(__file__).parent)
"""Each step closes over it: numba caches what it compiled by the date of the step's file and by what it closes over,
and the functions that it calls, of other files too, are compiled into it."""


def compiled(step):
    """What each thread runs, a function of a job's address; cached on disk where that is possible."""
    signature = types.void(types.voidptr)
    try:
        return cfunc(signature, cache=True, **SUMS)(step)
    except RuntimeError:  # numba has no cache folder that it can write to
        return cfunc(signature, **SUMS)(step)


_parallel = ctypes.CDLL(None).GOMP_parallel
_parallel.argtypes, _parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None


def run(step, job: ctypes.Structure, threads: int) -> None:
    """Do a job on so many of torch's threads."""
    _parallel(step.address, ctypes.addressof(job), threads, 0)
