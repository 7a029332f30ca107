"""Helpers of several Triton kernels: shares of work, products, soft caps, dependent launches.

Kernels import the constants by name, because otherwise Triton does not recompile them when a constant changes.
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
