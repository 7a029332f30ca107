"""Jobs, scratch memory, threads and the output of the compiled decode steps."""

import ctypes
import zlib
from pathlib import Path

import numpy as np
from numba import carray, cfunc, config, njit, types
from numba.extending import intrinsic

from sparsekv.kernels.attention.lanes_numba import NOTHING, SUMS, exp_of, exponents, largest_of

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
    """The compiled function that each thread runs with a job's address; cached on disk where that is possible."""
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


ADDRESSES = "centroids counts log_counts starts stand_values query keys values exact_keys exact_values sinks"
SIZES = "scratch output H G D C E budget replace key_step value_step exact_key_step exact_value_step"


class Job(ctypes.Structure):
    """Addresses, sizes, strides in bytes between heads (`_step`), and scale and soft cap of the logits."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in f"{ADDRESSES} {SIZES}".split()),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


JOB = np.dtype(Job)


@intrinsic
def _pointer(context, address, element):
    kind = types.CPointer(element.dtype)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64, element), generate


@njit(inline="always")
def floats(address, shape):
    return carray(_pointer(address, np.float32), shape)


@njit(inline="always")
def ints(address, shape):
    return carray(_pointer(address, np.int32), shape)


@njit(inline="always")
def longs(address, shape):
    return carray(_pointer(address, np.int64), shape)


@njit(inline="always")
def scores_of(job):
    """Scores [H, C], at the start of the scratch memory; lengths, weights, parts and sums follow them."""
    return floats(job.scratch, (job.H, job.C))


@njit(inline="always")
def ranks_of(job):
    """Bits of the scores as int32, which have the same order because no score is negative."""
    return ints(job.scratch, (job.H, job.C))


@njit(inline="always")
def lengths_of(job):
    """[H, C] number of tokens to take of each cluster."""
    return ints(job.scratch + 4 * job.H * job.C, (job.H, job.C))


@njit(inline="always")
def weights_of(job):
    """[H, G, C + budget + E] logits, later their exponentials, of clusters, chosen rows and exact rows."""
    return floats(job.scratch + 8 * job.H * job.C, (job.H, job.G, job.C + job.budget + job.E))


@njit(inline="always")
def parts_of(job, threads):
    """Each thread's partial outputs [threads, H, G, D], and their largest logits and sums [threads, H, G, 2]."""
    H, G, D = job.H, job.G, job.D
    address = job.scratch + 8 * H * job.C + 4 * H * G * (job.C + job.budget + job.E)
    return floats(address, (threads, H, G, D)), floats(address + 4 * threads * H * G * D, (threads, H, G, 2))


def scratch_size(H: int, G: int, D: int, C: int, rows: int, threads: int) -> int:
    """Size of the scratch memory in 32-bit numbers."""
    return 2 * H * C + H * G * (C + rows) + threads * H * G * (D + 2)


@njit(inline="always")
def clear(parts, sums):
    """Empty partial outputs [H, G, D] of a thread, with no logit in their sums [H, G, 2]."""
    for h in range(parts.shape[0]):
        for g in range(parts.shape[1]):
            sums[h, g, 0], sums[h, g, 1] = NOTHING, 0
            for d in range(parts.shape[2]):
                parts[h, g, d] = 0


@njit(inline="always")
def to_weights(logits, sums, start, stop, first, last):
    """Replace the logits [G, ...] of two ranges by their exponentials, relative to the largest of them; writes that
    and the exponentials' sum to sums [G, 2]."""
    for g in range(logits.shape[0]):
        largest = largest_of(logits[g], start, stop, largest_of(logits[g], first, last, NOTHING))
        sums[g, 0], largest = largest, np.float32(0) if largest == NOTHING else largest
        sums[g, 1] = exponents(logits[g], start, stop, largest)
        sums[g, 1] += exponents(logits[g], first, last, largest)


@njit(inline="always")
def join(job, parts, sums):
    """Write each head's output [G, D] of all threads' parts [threads, H, G, D] and sums, and of its sink logit."""
    H, G, D = job.H, job.G, job.D
    output = floats(job.output, (H, G, D))
    for h in range(H):
        for g in range(G):
            sink = floats(job.sinks, (H, G))[h, g] if job.sinks else NOTHING
            largest = sink
            for thread in range(len(parts)):
                largest = max(largest, sums[thread, h, g, 0])
            total = exp_of(sink - largest)
            for d in range(D):
                output[h, g, d] = 0
            for thread in range(len(parts)):
                weight = exp_of(sums[thread, h, g, 0] - largest)
                total += weight * sums[thread, h, g, 1]
                for d in range(D):
                    output[h, g, d] += weight * parts[thread, h, g, d]
            for d in range(D):
                output[h, g, d] /= total
