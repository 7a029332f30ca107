"""Compiled products of few float32 rows with quantised weights on a CPU; the threads share the outputs.

The weights of OUTPUTS outputs at a time are converted to float32 in a core's own cache, and multiplied by all rows. For
a single row, int8 weights are converted in registers.
"""

import ctypes

import numpy as np
from numba import carray, njit

from sparsekv.kernels.attention.compiled_step_numba import (
    SUMS,
    VERSION,
    compiled,
    fetch,
    floats,
    ints,
    pointer,
    thread_count,
    thread_number,
)

OUTPUTS = 4
LINE = 64  # bytes of a cache line
AHEAD = 2048  # distance of the prefetch, in bytes
GROUP = 32
NUMBER = 4  # bytes of a float32


FIELDS = "rows numbers scales bias output scratch R N K P bits".split()  # noqa: SIM905 (as the other jobs)


@njit(inline="always")
def signed_bytes(address, shape):
    return carray(pointer(address, np.int8), shape)


@njit(inline="always")
def unsigned_bytes(address, shape):
    return carray(pointer(address, np.uint8), shape)


class Job(ctypes.Structure):
    """Addresses and sizes of rows [R, K], numbers, scales, bias [N] or 0, output [R, N], and scratch memory.

    The scratch memory is [threads, OUTPUTS, P + R]. P is K for int8 numbers. For 4-bit numbers it is K rounded up to
    whole pairs of groups.
    """

    _fields_ = [(name, ctypes.c_int64) for name in FIELDS]


JOB = np.dtype(Job)


@njit(**SUMS)
def _restore_int8(numbers, weights):
    for k in range(len(numbers)):
        weights[k] = np.float32(numbers[k])


@njit(**SUMS)
def _restore_int4(packed, scales, weights):
    """Convert 4-bit numbers [pairs, GROUP], with words [pairs] of two bfloat16 scales, to weights."""
    for pair in range(len(packed)):
        first, second = 2 * GROUP * pair, 2 * GROUP * pair + GROUP
        low = np.int32(scales[pair] << np.int32(16)).view(np.float32)
        high = np.int32(scales[pair] & np.int32(-65536)).view(np.float32)
        for j in range(GROUP):
            both = np.int32(packed[pair, j])
            weights[first + j] = np.float32((both & np.int32(15)) - np.int32(8)) * low
            weights[second + j] = np.float32((both >> np.int32(4)) - np.int32(8)) * high


@njit(**SUMS)
def _multiply(rows, weights, sums):
    """Compute the products [R, OUTPUTS] of rows [R, K] and weights [OUTPUTS, at least K]."""
    for r in range(rows.shape[0]):
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for k in range(rows.shape[1]):
            a += weights[0, k] * rows[r, k]
            b += weights[1, k] * rows[r, k]
            c += weights[2, k] * rows[r, k]
            d += weights[3, k] * rows[r, k]
        sums[r, 0], sums[r, 1], sums[r, 2], sums[r, 3] = a, b, c, d


@njit(**SUMS)
def _multiply_int8(row, numbers, sums):
    """Compute the products of one row [K] and numbers [OUTPUTS, K], converted in registers."""
    a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for k in range(len(row)):
        a += np.float32(numbers[0, k]) * row[k]
        b += np.float32(numbers[1, k]) * row[k]
        c += np.float32(numbers[2, k]) * row[k]
        d += np.float32(numbers[3, k]) * row[k]
    sums[0], sums[1], sums[2], sums[3] = a, b, c, d


@njit(inline="always")
def _share(job, thread, threads):
    """Compute a thread's share of the outputs."""
    R, N, K, P = job.R, job.N, job.K, job.P
    size = K if job.bits == 8 else P // 2
    rows, output = floats(job.rows, (R, K)), floats(job.output, (R, N))
    weights = floats(job.scratch + NUMBER * thread * OUTPUTS * (P + R), (OUTPUTS, P))
    sums = floats(job.scratch + NUMBER * (thread * OUTPUTS * (P + R) + OUTPUTS * P), (R, OUTPUTS))
    for first in range(thread * N // threads, (thread + 1) * N // threads, OUTPUTS):
        some = min(OUTPUTS, (thread + 1) * N // threads - first)
        for place in range(0, OUTPUTS * size, LINE):
            fetch(job.numbers + first * size + AHEAD + place)
        if job.bits == 8 and R == 1 and some == OUTPUTS:
            _multiply_int8(rows[0], signed_bytes(job.numbers + first * K, (OUTPUTS, K)), sums[0])
        else:
            for i in range(some):
                if job.bits == 8:
                    _restore_int8(signed_bytes(job.numbers + (first + i) * K, (K,)), weights[i])
                else:
                    pairs = P // (2 * GROUP)
                    packed = unsigned_bytes(job.numbers + (first + i) * pairs * GROUP, (pairs, GROUP))
                    _restore_int4(packed, ints(job.scales + NUMBER * (first + i) * pairs, (pairs,)), weights[i])
            _multiply(rows, weights, sums)
        for i in range(some):
            n = first + i
            scale = floats(job.scales, (N,))[n] if job.bits == 8 else np.float32(1)
            bias = floats(job.bias, (N,))[n] if job.bias else np.float32(0)
            for r in range(R):
                output[r, n] = sums[r, i] * scale + bias


def _step(version):
    """Make the step function; it closes over `version`, so that numba's cache key includes the checksum `VERSION`."""

    def step(address):
        _ = version
        _share(carray(address, 1, JOB)[0], np.int64(thread_number()), np.int64(thread_count()))

    return step


# The step stays alive as a global, because its machine code is freed together with the object.
STEP = compiled(_step(VERSION))
