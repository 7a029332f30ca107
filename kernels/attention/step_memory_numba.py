"""What the threads of a compiled decode step share: a job, the record of addresses and sizes, and scratch memory.

Compiled functions see both as arrays; see `cluster_step_numba`.
"""

import ctypes

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

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
