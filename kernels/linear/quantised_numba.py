"""Compiled products of few float32 rows with quantised weights on a CPU; the threads share the outputs.

The weights of OUTPUTS outputs at a time are converted to float32 in a core's own cache, and multiplied by all rows. For
a single row, int8 weights are converted in vector registers, WIDE weights at a time.
"""

import ctypes

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, models, register_model

from sparsekv.kernels.attention.compiled_step_numba import (
    SUMS,
    VERSION,
    address_as,
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

    The scratch memory is [threads, OUTPUTS, P + R]. A single row with int8 numbers needs none. P is K for int8 numbers.
    For 4-bit numbers it is K rounded up to whole pairs of groups.
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


WIDE = 16
WIDE_IR = ir.VectorType(ir.FloatType(), WIDE)
BYTES_IR = ir.VectorType(ir.IntType(8), WIDE)
WHOLE_IR = ir.VectorType(ir.IntType(32), WIDE)


class WideType(types.Type):  # type: ignore[misc]
    """Numba type of a vector of WIDE float32: one register with AVX-512, several registers without it.

    Numba's own loops use half of an AVX-512 register, because LLVM prefers vectors of 256 bits.
    """

    def __init__(self):
        super().__init__(name="Wide")


WIDE_OF = WideType()


@register_model(WideType)
class WideModel(models.PrimitiveModel):  # type: ignore[misc]
    """Data model of `WideType`: a vector of LLVM."""

    def __init__(self, manager, kind):
        super().__init__(manager, kind, WIDE_IR)


@intrinsic
def wide_zeros(context):
    """Return a vector of WIDE zeros."""
    return WIDE_OF(), lambda context, builder, signature, arguments: ir.Constant(WIDE_IR, [0.0] * WIDE)


@intrinsic
def load_wide(context, address):
    """Load the WIDE float32 at an address."""

    def generate(context, builder, signature, arguments):
        return builder.load(address_as(builder, arguments[0], WIDE_IR), align=4)

    return WIDE_OF(types.int64), generate


@intrinsic
def plus_bytes(context, sums, address, factors):
    """Compute sums + factors * numbers, with the WIDE int8 at an address."""

    def generate(context, builder, signature, arguments):
        sums, address, factors = arguments
        numbers = builder.sext(builder.load(address_as(builder, address, BYTES_IR), align=1), WHOLE_IR)
        products = builder.fmul(builder.sitofp(numbers, WIDE_IR), factors, flags=("contract",))
        return builder.fadd(sums, products, flags=("contract",))

    return WIDE_OF(WIDE_OF, types.int64, WIDE_OF), generate


@intrinsic
def sum_of(context, sums):
    """Add up the elements of a vector, pair by pair."""

    def generate(context, builder, signature, arguments):
        left, size = arguments[0], WIDE
        while size > 1:
            size //= 2
            halves = (
                ir.Constant(ir.VectorType(ir.IntType(32), size), [*range(first, first + size)]) for first in (0, size)
            )
            left = builder.fadd(*(builder.shuffle_vector(left, left, half) for half in halves))
        return builder.extract_element(left, ir.Constant(ir.IntType(32), 0))

    return types.float32(WIDE_OF), generate


@njit(**SUMS)
def _multiply_int8(row, numbers, K, ahead):
    """Compute the products of the row [K] at one address and the numbers [OUTPUTS, K] at another.

    Prefetches the numbers `ahead` bytes further on.
    """
    second, third, fourth = numbers + K, numbers + 2 * K, numbers + 3 * K
    a, b, c, d = wide_zeros(), wide_zeros(), wide_zeros(), wide_zeros()
    whole = K - K % WIDE
    for k in range(0, whole, WIDE):
        fetch(numbers + ahead + OUTPUTS * k)
        some = load_wide(row + NUMBER * k)
        a, b = plus_bytes(a, numbers + k, some), plus_bytes(b, second + k, some)
        c, d = plus_bytes(c, third + k, some), plus_bytes(d, fourth + k, some)
    one, two, three, four = sum_of(a), sum_of(b), sum_of(c), sum_of(d)
    exact, rest = floats(row, (K,)), signed_bytes(numbers, (OUTPUTS, K))
    for k in range(whole, K):
        one += np.float32(rest[0, k]) * exact[k]
        two += np.float32(rest[1, k]) * exact[k]
        three += np.float32(rest[2, k]) * exact[k]
        four += np.float32(rest[3, k]) * exact[k]
    return one, two, three, four


@njit(**SUMS)
def _multiply_output(row, numbers):
    """Compute the product of a row [K] and the numbers [K] of one output."""
    total = np.float32(0)
    for k in range(len(row)):
        total += np.float32(numbers[k]) * row[k]
    return total


@njit(inline="always")
def _output(job, n, total):
    """Compute an output from the sum of the products of numbers and row."""
    scale = floats(job.scales, (job.N,))[n] if job.bits == 8 else np.float32(1)
    return total * scale + (floats(job.bias, (job.N,))[n] if job.bias else np.float32(0))


@njit(inline="always")
def _share_of_row(job, start, stop):
    """Compute the outputs `start` to `stop` (excluded) of a single row with int8 numbers."""
    K, output = job.K, floats(job.output, (job.N,))
    fours = stop - (stop - start) % OUTPUTS
    for n in range(start, fours, OUTPUTS):
        one, two, three, four = _multiply_int8(job.rows, job.numbers + n * K, K, AHEAD)
        output[n], output[n + 1] = _output(job, n, one), _output(job, n + 1, two)
        output[n + 2], output[n + 3] = _output(job, n + 2, three), _output(job, n + 3, four)
    for n in range(fours, stop):
        numbers = signed_bytes(job.numbers + n * K, (K,))
        output[n] = _output(job, n, _multiply_output(floats(job.rows, (K,)), numbers))


@njit(inline="always")
def _share_of_rows(job, thread, start, stop):
    """Compute the outputs `start` to `stop` (excluded) of all rows."""
    R, N, K, P = job.R, job.N, job.K, job.P
    size = K if job.bits == 8 else P // 2
    rows, output = floats(job.rows, (R, K)), floats(job.output, (R, N))
    weights = floats(job.scratch + NUMBER * thread * OUTPUTS * (P + R), (OUTPUTS, P))
    sums = floats(job.scratch + NUMBER * (thread * OUTPUTS * (P + R) + OUTPUTS * P), (R, OUTPUTS))
    for first in range(start, stop, OUTPUTS):
        some = min(OUTPUTS, stop - first)
        for place in range(0, OUTPUTS * size, LINE):
            fetch(job.numbers + first * size + AHEAD + place)
        for i in range(some):
            if job.bits == 8:
                _restore_int8(signed_bytes(job.numbers + (first + i) * K, (K,)), weights[i])
            else:
                pairs = P // (2 * GROUP)
                packed = unsigned_bytes(job.numbers + (first + i) * pairs * GROUP, (pairs, GROUP))
                _restore_int4(packed, ints(job.scales + NUMBER * (first + i) * pairs, (pairs,)), weights[i])
        _multiply(rows, weights, sums)
        for i in range(some):
            for r in range(R):
                output[r, first + i] = _output(job, first + i, sums[r, i])


@njit(inline="always")
def _share(job, thread, threads):
    """Compute a thread's share of the outputs."""
    start, stop = thread * job.N // threads, (thread + 1) * job.N // threads
    if job.bits == 8 and job.R == 1:
        _share_of_row(job, start, stop)
    else:
        _share_of_rows(job, thread, start, stop)


def _step(version):
    """Make the step function; it closes over `version`, so that numba's cache key includes the checksum `VERSION`."""

    def step(address):
        _ = version
        _share(carray(address, 1, JOB)[0], np.int64(thread_number()), np.int64(thread_count()))

    return step


# The step stays alive as a global, because its machine code is freed together with the object.
STEP = compiled(_step(VERSION))
