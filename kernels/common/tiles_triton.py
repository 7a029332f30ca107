"""Helpers of several Triton kernels: shares of work, products, soft caps, dependent launches, and pairs of int8 values.

Kernels import the constants by name, because otherwise Triton does not recompile them when a constant changes.

Of an int8 row, the values of two adjacent channels are read together, as one int16. Tensor cores multiply float16. For
the product with values, an operand is loaded transposed from shared memory: two elements at a time if they have 16
bits, but one by one if they have 8. Therefore the int8 values stay in pairs until they are in the registers of the
multiplication. A row's channels become two operands of half the width: the first channel of each pair, and the second.
"""

import math

import triton
import triton.language as tl

# True in the interpreter, which stores bfloat16 as integers and would multiply these integers.
WIDEN = tl.constexpr(triton.knobs.runtime.interpret)
# Logits times LOG2_E are exponents of 2. A power of 2 takes one instruction less than a power of e.
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def share(part, parts, rows):
    """Split `rows` rows into `parts` parts; return the range (first, end) of part number `part`.

    The parts are equal, except that the first ones may have one row more.
    """
    size, more = rows // parts, rows % parts
    first = part * size + tl.minimum(part, more)
    return first, first + size + (part < more).to(tl.int32)


@triton.jit
def wait_for_previous_kernel(EARLY: tl.constexpr):
    """Wait for the previous kernel if this kernel was launched early, then let the next kernel launch.

    A program must call this before it reads data that an earlier kernel writes. Before the call, it may only read or
    prefetch data that no running kernel writes, and write memory that no running kernel uses.
    """
    only_wait(EARLY)
    let_next_launch(EARLY)


@triton.jit
def only_wait(EARLY: tl.constexpr):
    """Wait for the previous kernel if this kernel was launched early; all programs must call `let_next_launch` later.

    This is the first half of `wait_for_previous_kernel`.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_launch(EARLY: tl.constexpr):
    """Let the next kernel launch once all programs of this kernel have made this call; without EARLY, do nothing."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(rows, number, MOST: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr):
    """Prefetch data into the L2 cache before a kernel waits for the previous kernel; without EARLY, do nothing.

    The data are the first `number` elements of SIZE bytes, at most MOST, prefetched by lines of 128 bytes. The previous
    kernel must not write them.
    """
    if EARLY:
        LINE: tl.constexpr = 128 // SIZE
        element = tl.arange(0, MOST // LINE) * LINE
        place = (rows + tl.where(element < number, element, 0)).to(tl.int64)
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [place], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def capped(logits, softcap, CAPPED: tl.constexpr):
    """Return softcap * tanh(logits / softcap) with CAPPED, else the logits."""
    if CAPPED:
        # triton.language has no tanh: tanh(x) = 2 sigmoid(2 x) - 1.
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits


@triton.jit
def exp2_flushed(exponents):
    """Compute 2 to the power of float32 exponents.

    On a GPU, results below 2^-126 become 0, because computing them would take three more instructions.
    """
    if WIDEN:
        return tl.exp2(exponents)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [exponents], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def log2_of_normal(numbers):
    """Compute log2 of float32 numbers that are neither zero nor subnormal.

    Without these cases the logarithm takes one instruction instead of ten.
    """
    if WIDEN:
        return tl.log2(numbers)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [numbers], tl.float32, is_pure=True, pack=1)


@triton.jit
def tile_weights(peak, logits):
    """Update the peak [R] of a running softmax by a tile's logits [R, TILE], in units of log 2.

    Return the new peak, the tile's weights 2 ** (logits - new peak), and the factor [R] that earlier sums must be
    multiplied by, because they are relative to the old peak.
    """
    highest = tl.maximum(peak, tl.max(logits, 1))
    # All tiles so far may be completely masked.
    safe = tl.where(highest == -float("inf"), 0.0, highest)
    return highest, exp2_flushed(logits - safe[:, None]), exp2_flushed(peak - safe)


@triton.jit
def sum_of_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_of_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def sum_of_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def product(a, b):
    """Multiply a and b in float32, without fusion into a following sum.

    In a sum across threads, each thread adds its own product and those of other threads. With a fused multiply-add,
    threads would round the same sum differently, and write different values to the same address.
    """
    if WIDEN:
        return a * b
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)


@triton.jit
def dot(a, b):
    """Compute the matrix product a b with float32 sums, on tensor cores except for float32, which they would round."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    precision: tl.constexpr = "ieee" if a.dtype == tl.float32 else "tf32"
    return tl.dot(a, b, input_precision=precision)


LARGEST_HALF = tl.constexpr(65504.0)
# An int8 value of -128 to 127 becomes a byte of 0 to 255 when its highest bit is flipped. With 0x64 as the upper byte,
# it is a float16 number of 1024 to 1279, which is the int8 value plus SHIFT. The GPU's own conversion takes one
# instruction for each value, at a quarter of the speed.
SHIFT = tl.constexpr(1152.0)
_FIRST = tl.constexpr("lop3.b32 $0, $1, 0x00FF00FF, 0x64806480, 0x6A;")
_SECOND = tl.constexpr("{ .reg .b32 bytes; xor.b32 bytes, $1, 0x80808080; prmt.b32 $0, bytes, 0x64646464, 0x4341; }")
_SHIFTED_BACK = tl.constexpr("{ .reg .b32 middle; mov.b32 middle, 0x64806480; sub.f16x2 $0, $1, middle; }")


@triton.jit
def first_of(pairs, EXACT: tl.constexpr):
    """Convert the first int8 value of each pair [..., D / 2] int16 to float16, plus SHIFT.

    With EXACT, or in the interpreter, the result is float32 without SHIFT.
    """
    if EXACT or WIDEN:
        return pairs.to(tl.int8).to(tl.float32)
    else:  # the `else` is needed: code after a return is compiled too, and this branch returns another type
        return tl.inline_asm_elementwise(_FIRST, "=r,r", [pairs], tl.float16, is_pure=True, pack=2)


@triton.jit
def second_of(pairs, EXACT: tl.constexpr):
    """Convert the second int8 value of each pair, like `first_of`."""
    if EXACT or WIDEN:
        return (pairs >> 8).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(_SECOND, "=r,r", [pairs], tl.float16, is_pure=True, pack=2)


@triton.jit
def shifted_back(numbers, EXACT: tl.constexpr):
    """Subtract SHIFT from the results of `first_of` or `second_of`, two values per instruction.

    With EXACT, or in the interpreter, these results are without SHIFT, and are returned unchanged.
    """
    if EXACT or WIDEN:
        return numbers
    else:
        return tl.inline_asm_elementwise(_SHIFTED_BACK, "=r,r", [numbers], tl.float16, is_pure=True, pack=2)


@triton.jit
def in_pairs(rows, R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Split rows [R, D] into the pairs' first channels and second channels, [R, D / 2] each."""
    return tl.split(tl.reshape(rows, [R, BLOCK_D // 2, 2]))


@triton.jit
def from_pairs(first, second, R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Interleave the pairs' first and second channels [R, D / 2] to rows [R, D]."""
    return tl.reshape(tl.join(first, second), [R, BLOCK_D])


@triton.jit
def scaled_queries(q, channels, offsets, d, in_row, scale, EACH: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Multiply queries [R, D] by the scales of the keys' channels, for products with int8 keys.

    The scaled queries are divided by a largest magnitude, so that they fit in float16. With EACH, it is the largest
    magnitude of each query. Otherwise it is the largest of all queries, which saves a multiplication of each logit. The
    kernels use EACH if the queries are of several tokens.

    Returns:
        the scaled queries in pairs, [R, D / 2] each; the term [R] that SHIFT adds to their products with keys; the
        largest magnitude times `scale`, [R] with EACH; and the products [R] of the unscaled queries with the channels'
        offsets, times `scale`.
    """
    EXACT: tl.constexpr = q.dtype == tl.float32
    exact = q.to(tl.float32)
    scaled = exact * tl.load(channels + d, mask=in_row, other=0.0).to(tl.float32)[None, :]
    products = tl.sum(exact * tl.load(offsets + d, mask=in_row, other=0.0).to(tl.float32)[None, :], 1)
    of_each = tl.max(tl.abs(scaled), 1)
    if EACH:
        largest = tl.where(of_each == 0.0, 1.0, of_each)
        scaled = scaled / largest[:, None]
    else:
        most = tl.max(of_each, 0)
        largest = tl.where(most == 0.0, 1.0, most)
        scaled = scaled / largest
    shift = tl.zeros([R], tl.float32)
    if not EXACT:
        scaled = scaled.to(tl.float16)
        if not WIDEN:
            shift = tl.sum(scaled.to(tl.float32), 1) * SHIFT
    first, second = in_pairs(scaled, R, BLOCK_D)
    return first, second, shift, largest * scale, products * scale


@triton.jit
def scales_of(words, of_queries, unit):
    """Unpack words [TILE] of two bfloat16 scales.

    Returns the scales of keys times `of_queries`, and the scales of values divided by `unit`, at most LARGEST_HALF.
    """
    of_keys = (words << 16).to(tl.float32, bitcast=True) * of_queries
    return of_keys, tl.minimum((words & -65536).to(tl.float32, bitcast=True) / unit, LARGEST_HALF)


@triton.jit
def load_pairs(rows, places, in_row, ALL: tl.constexpr):
    """Load pairs [TILE, D / 2] int16 at some offsets; with ALL, the block has no padding and needs no mask."""
    if ALL:
        return tl.load(rows + places)
    else:
        return tl.load(rows + places, mask=in_row[None, :], other=0)


@triton.jit
def pair_products(first, second, shift, keys, EXACT: tl.constexpr):
    """Compute the products [R, TILE] of scaled queries, in pairs, with int8 keys in pairs, [TILE, D / 2] int16."""
    turned = tl.trans(keys)
    return dot(first, first_of(turned, EXACT)) + dot(second, second_of(turned, EXACT)) - shift[:, None]
