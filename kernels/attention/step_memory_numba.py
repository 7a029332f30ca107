"""Job structures, scratch memory, work sharing between threads and output merging of the compiled decode steps."""

import ctypes
import zlib
from pathlib import Path

import numpy as np
from numba import carray, cfunc, config, njit, types
from numba.extending import intrinsic

from sparsekv.kernels.attention.lanes_numba import NOTHING, SUMS, exp_of, exponents, largest_of

if config.DISABLE_JIT:
    raise ImportError("numba's compiler is switched off: unset NUMBA_DISABLE_JIT")

thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
thread_count = types.ExternalFunction("omp_get_num_threads", types.int32())
wait_for_all = types.ExternalFunction("GOMP_barrier", types.void())


@njit(inline="always")
def share_of(offset, length, total, thread, threads):
    """Split `total` items evenly over `threads` threads; return thread `thread`'s range within one segment of them.

    The segment is items `offset` to `offset + length` (excluded). The range (start, stop) is counted from the segment's
    start. If the thread has no items of the segment, start and stop are equal.
    """
    start, stop = thread * total // threads - offset, (thread + 1) * total // threads - offset
    return min(max(start, 0), length), min(max(stop, 0), length)


def sources(folder: Path) -> int:
    """Compute a checksum of the numba source files in a folder and in the folders below it."""
    checksum = 0
    for path in sorted(folder.rglob("*_numba.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return checksum


VERSION = sources(Path(__file__).parent.parent)
"""Checksum of all numba source files of the kernels; each step function closes over this number.

Numba's cache key of a function is the date of its file and the values that the function closes over. The machine code
of a step also contains functions from other files. With the checksum, a change of those files invalidates the cache.
"""


def compiled(step):
    """Compile the function that each thread calls with the address of a step's job; cache the code where possible."""
    signature = types.void(types.voidptr)
    try:
        return cfunc(signature, cache=True, **SUMS)(step)
    except RuntimeError:  # numba has no writable cache folder
        return cfunc(signature, **SUMS)(step)


STEP = "query keys values exact_keys exact_values sinks scratch output"
SIZES = "H G D C E fours budget replace key_step value_step exact_key_step exact_value_step"


def job_type(addresses: str, sizes: str = "") -> type[ctypes.Structure]:
    """Build the C structure type of a job, which holds the arguments of one compiled step.

    `addresses` are the names of the layer's tensors. The tensors of STEP, the sizes of SIZES, and the scale and soft
    cap of the logits are fields of every job. `sizes` names further sizes. Fields named `..._step` are strides between
    heads, in bytes. `fours` is the number of vectors of four query heads that hold the G query heads of a KV head.
    """
    numbers = [(name, ctypes.c_int64) for name in f"{addresses} {STEP} {SIZES} {sizes}".split()]
    fields = [*numbers, ("scale", ctypes.c_float), ("softcap", ctypes.c_float)]
    return type("Job", (ctypes.Structure,), {"_fields_": fields})


@intrinsic
def pointer(context, address, element):
    kind = types.CPointer(element.dtype)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64, element), generate


@njit(inline="always")
def floats(address, shape):
    return carray(pointer(address, np.float32), shape)


@njit(inline="always")
def ints(address, shape):
    return carray(pointer(address, np.int32), shape)


@njit(inline="always")
def longs(address, shape):
    return carray(pointer(address, np.int64), shape)


@njit(inline="always")
def clear(parts, sums):
    """Reset a thread's partial outputs [H, G, D] to 0, and its sums [H, G, 2] to a maximum of -inf and a sum of 0."""
    for h in range(parts.shape[0]):
        for g in range(parts.shape[1]):
            sums[h, g, 0], sums[h, g, 1] = NOTHING, 0
            for d in range(parts.shape[2]):
                parts[h, g, d] = 0


@njit(inline="always")
def to_weights(logits, sums, start, stop, first, last):
    """Replace the logits [G, ...] in two ranges by exp(logit - largest), with each row's largest logit of both ranges.

    The ranges are `start` to `stop` and `first` to `last`. Write each row's largest logit and sum of exponentials to
    sums [G, 2].
    """
    for g in range(logits.shape[0]):
        largest = largest_of(logits[g], start, stop, largest_of(logits[g], first, last, NOTHING))
        sums[g, 0], largest = largest, np.float32(0) if largest == NOTHING else largest
        sums[g, 1] = exponents(logits[g], start, stop, largest)
        sums[g, 1] += exponents(logits[g], first, last, largest)


@njit(inline="always")
def join(job, parts, sums):
    """Merge the threads' partial outputs `parts` [threads, H, G, D] into the job's output, by their `sums`.

    The softmax includes the sink logits, if any.
    """
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
