"""Code that the compiled decode steps share: arithmetic, job structures, scratch memory, and work of several threads.

The arithmetic has vectors of four float32, logits, exponentials and weighted sums.
"""

import ctypes
import math
import zlib
from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, config, njit, types
from numba.extending import intrinsic, models, register_model

# The compiler may reorder sums in order to vectorise them. Infinities and NaN keep their meaning.
SUMS = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}
# A maximum may ignore NaN, because the exponentials that are computed next propagate NaN.
LARGEST = SUMS | {"fastmath": {"reassoc", "nsz", "nnan"}}
NOTHING = np.float32(-np.inf)
# Rows whose weights, or weighted values, are summed in float32 by themselves before the sum is added to the total. A
# single float32 sum over flat attention to 200,000 rows would be wrong by 0.1%.
SUMMED = 256


@njit(**SUMS)
def exp_of(x):
    """Compute exp(x) for x <= 0, with an absolute error below 2e-7.

    The compiler vectorises this polynomial, but would not vectorise a library call.
    """
    x *= np.float32(1.442695041)
    x = np.float32(-127) if x < np.float32(-127) else x
    whole = np.floor(x + np.float32(0.5))
    part = x - whole
    value = np.float32(1.535336188e-4)
    value = value * part + np.float32(1.339887440e-3)
    value = value * part + np.float32(9.618437357e-3)
    value = value * part + np.float32(5.550332471e-2)
    value = value * part + np.float32(2.402264791e-1)
    value = value * part + np.float32(6.931472028e-1)
    value = value * part + np.float32(1)
    return value * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(**LARGEST)
def largest_of(numbers, start, stop, most):
    for i in range(start, stop):
        most = max(most, numbers[i])
    return most


@njit(**SUMS)
def exponents(numbers, start, stop, largest):
    """Replace numbers[start : stop] by exp(number - largest); return their sum."""
    total = np.float64(0)
    for first in range(start, stop, SUMMED):
        block = np.float32(0)
        for i in range(first, min(first + SUMMED, stop)):
            numbers[i] = exp_of(numbers[i] - largest)
            block += numbers[i]
        total += block
    return total


@njit(**SUMS)
def write_logits(job, query, rows, start, stop, logits, ahead):
    """Write the logits of queries [G, D] for rows `start` to `stop` (excluded) of `rows` [T, D].

    The logits of row t go to logits [:, ahead + t]. The softmax scale and the soft cap are those of the job, the C
    structure of a step's arguments.
    """
    for t in range(start, stop):
        for g in range(query.shape[0]):
            product = np.float32(0)
            for d in range(query.shape[1]):
                product += query[g, d] * rows[t, d]
            logits[g, ahead + t] = product * job.scale
    cap_logits(job, logits, ahead + start, ahead + stop)


@njit(**SUMS)
def cap_logits(job, logits, start, stop):
    """Apply the job's soft cap, if any, to logits [G, start : stop]."""
    if job.softcap > 0:
        for g in range(logits.shape[0]):
            for place in range(start, stop):
                logits[g, place] = job.softcap * np.float32(math.tanh(logits[g, place] / job.softcap))


@njit(inline="always")
def _row(listed, i):
    return i if listed is None else listed[i]


@njit(inline="always")
def move_block(output, block):
    """Add the sum of a block of rows, `block` [G, D], to the outputs [G, D]; reset it to 0."""
    for g in range(output.shape[0]):
        for d in range(output.shape[1]):
            output[g, d] += block[g, d]
            block[g, d] = 0


@njit(**SUMS)
def add_rows(output, block, held, weights, ahead, rows, start, stop, listed):
    """Add weighted rows of `rows` [T, D] to the sum of a block of rows, `block` [G, D]; return the block's rows.

    Before this call, the block has `held` rows. Once it has SUMMED rows, its sum is moved to the outputs [G, D].
    Without `listed`, the rows are `start` to `stop` (excluded). With `listed` [N] int32, they are the rows whose
    indices are at positions `start` to `stop` of the list. Row i, or the row at position i, has weights [:, ahead + i].
    """
    for first in range(start, stop, SUMMED):
        last = min(first + SUMMED, stop)
        _add_block(block, weights, ahead, rows, first, last, listed)
        held += last - first
        if held >= SUMMED:
            move_block(output, block)
            held = 0
    return held


@njit(**SUMS)
def _add_block(block, weights, ahead, rows, start, stop, listed):
    """Add rows as `add_rows` does, four together, so that the sum is read and written less often."""
    fours = stop - max(stop - start, 0) % 4
    for i in range(start, fours, 4):
        one, two, three, four = _row(listed, i), _row(listed, i + 1), _row(listed, i + 2), _row(listed, i + 3)
        for g in range(block.shape[0]):
            place = ahead + i
            first, second, third, fourth = (
                weights[g, place], weights[g, place + 1], weights[g, place + 2], weights[g, place + 3]
            )  # fmt: skip
            for d in range(block.shape[1]):
                block[g, d] += (
                    first * rows[one, d] + second * rows[two, d] + third * rows[three, d] + fourth * rows[four, d]
                )
    for i in range(fours, stop):
        for g in range(block.shape[0]):
            weight = weights[g, ahead + i]
            for d in range(block.shape[1]):
                block[g, d] += weight * rows[_row(listed, i), d]


LANES = 4
LANES_IR = ir.VectorType(ir.FloatType(), LANES)
FUSED = ("contract",)


class LanesType(types.Type):  # type: ignore[misc]
    """Numba type of a vector of four float32."""

    def __init__(self):
        super().__init__(name="Lanes")


LANES_OF = LanesType()


@register_model(LanesType)
class LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    """Data model of `LanesType`: a vector register."""

    def __init__(self, manager, kind):
        super().__init__(manager, kind, LANES_IR)


def address_as(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def load_lanes(context, address):
    """Load the four float32 at an address."""

    def generate(context, builder, signature, arguments):
        return builder.load(address_as(builder, arguments[0], LANES_IR), align=4)

    return LANES_OF(types.int64), generate


@intrinsic
def store_lanes(context, address, lanes):
    """Store a vector of four float32 at an address."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], address_as(builder, arguments[0], LANES_IR), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, LANES_OF), generate


@intrinsic
def no_lanes(context):
    """Return a vector of four zeros."""
    return LANES_OF(), lambda context, builder, signature, arguments: ir.Constant(LANES_IR, [0.0] * LANES)


@intrinsic
def plus(context, first, second):
    """Add two vectors of four float32."""
    return LANES_OF(LANES_OF, LANES_OF), lambda context, builder, signature, arguments: builder.fadd(*arguments)


@intrinsic
def plus_times(context, lanes, factor, others):
    """Compute lanes + factor * others, where the scalar factor multiplies all four."""

    def generate(context, builder, signature, arguments):
        lanes, factor, others = arguments
        first = ir.Constant(ir.IntType(32), 0)
        one = builder.insert_element(ir.Constant(LANES_IR, ir.Undefined), factor, first)
        every = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))
        return builder.fadd(lanes, builder.fmul(every, others, flags=FUSED), flags=FUSED)

    return LANES_OF(LANES_OF, types.float32, LANES_OF), generate


@intrinsic
def byte_at(context, address):
    """Load the byte at an address, as int64."""

    def generate(context, builder, signature, arguments):
        return builder.zext(builder.load(address_as(builder, arguments[0], ir.IntType(8))), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def fetch(context, address):
    """Prefetch the cache line at an address."""

    def generate(context, builder, signature, arguments):
        kind = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", (kind,), ir.FunctionType(ir.VoidType(), [kind, number, number, number])
        )
        pointer = builder.inttoptr(arguments[0], kind)
        builder.call(prefetch, [pointer, *(ir.Constant(number, one) for one in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def add_one(context, address):
    """Atomically add 1 to the int32 at an address; return the old value.

    Writes before this call are visible to every thread that adds later.
    """

    def generate(context, builder, signature, arguments):
        number = ir.IntType(32)
        pointer = builder.inttoptr(arguments[0], number.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(number, 1), "seq_cst")

    return types.int32(types.int64), generate


if config.DISABLE_JIT:
    raise ImportError("numba's compiler is switched off: unset NUMBA_DISABLE_JIT")

thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
thread_count = types.ExternalFunction("omp_get_num_threads", types.int32())
wait_for_all = types.ExternalFunction("GOMP_barrier", types.void())


@njit(inline="always")
def share_of(offset, length, total, thread, threads):
    """Split `total` items evenly over `threads` threads; return one thread's range within a segment of the items.

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
def clear(parts, sums, block):
    """Reset a thread's partial outputs [H, G, D] and its block of rows [G, D] to 0.

    Reset its sums [H, G, 2] to a maximum of -inf and a sum of 0.
    """
    for h in range(parts.shape[0]):
        for g in range(parts.shape[1]):
            sums[h, g, 0], sums[h, g, 1] = NOTHING, 0
            for d in range(parts.shape[2]):
                parts[h, g, d], block[g, d] = 0, 0


@njit(inline="always")
def to_weights(logits, sums, start, stop, first, last):
    """Replace the logits [G, ...] in two ranges by exp(logit - largest), with each row's largest logit of both ranges.

    The ranges are `start` to `stop` and `first` to `last`. Write each row's largest logit and sum of exponentials to
    sums [G, 2].
    """
    for g in range(logits.shape[0]):
        largest = largest_of(logits[g], start, stop, largest_of(logits[g], first, last, NOTHING))
        sums[g, 0], largest = largest, np.float32(0) if largest == NOTHING else largest
        sums[g, 1] = exponents(logits[g], start, stop, largest) + exponents(logits[g], first, last, largest)


@njit(inline="always")
def join(job, parts, sums):
    """Merge the threads' partial outputs `parts` [threads, H, G, D] into the job's output.

    `sums` [threads, H, G, 2] are each part's largest logit and sum of exponentials. The softmax includes the sink
    logits, if any.
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
