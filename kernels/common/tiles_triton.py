"""Helpers of several Triton kernels: shares of work, products, soft caps, dependent launches.

Kernels import the module for its functions, and its constants by name: Triton compiles anew for other values of named
constants only.
"""

import math

import triton
import triton.language as tl

# The interpreter stores bfloat16 as integers, and would multiply those.
WIDEN = tl.constexpr(triton.knobs.runtime.interpret)
# Logits times this are exponents of 2: a power of 2 takes one instruction less than one of e.
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def share(part, parts, rows):
    """Start and stop of one of `parts` equal parts of some rows; the first parts may have one row more."""
    size, more = rows // parts, rows % parts
    first = part * size + tl.minimum(part, more)
    return first, first + size + (part < more).to(tl.int32)


@triton.jit
def wait_for_previous_kernel(EARLY: tl.constexpr):
    """Wait for the previous kernel if this one was launched early, then let the next one launch.

    Must come before a program reads what another kernel writes. What is read or fetched before it, nothing writes.
    """
    only_wait(EARLY)
    let_next_launch(EARLY)


@triton.jit
def only_wait(EARLY: tl.constexpr):
    """The first half of `wait_for_previous_kernel`; `let_next_launch` must follow, in all programs."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_launch(EARLY: tl.constexpr):
    """Let the next kernel be launched, once all programs of this one have come here."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(rows, number, MOST: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr):
    """Bring what a kernel that is launched early will read into the cache, before it waits for the kernel before it,
    which must not be writing it: the first `number` of at most MOST elements of SIZE bytes, 128 bytes at a time."""
    if EARLY:
        LINE: tl.constexpr = 128 // SIZE
        element = tl.arange(0, MOST // LINE) * LINE
        place = (rows + tl.where(element < number, element, 0)).to(tl.int64)
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [place], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def capped(logits, softcap, CAPPED: tl.constexpr):
    """softcap tanh(logits / softcap) if there is a soft cap, else the logits."""
    if CAPPED:
        # triton.language has no tanh: tanh(x) = 2 sigmoid(2 x) - 1.
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits


@triton.jit
def exp2_flushed(exponents):
    """2 to the power of float32 exponents. Results below 2^-126 are 0, which saves the three instructions of four that
    look for them."""
    if WIDEN:
        return tl.exp2(exponents)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [exponents], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def log2_of_normal(numbers):
    """Logarithms to base 2 of float32 that are neither zero nor subnormal: without looking for these it takes one
    instruction, not ten."""
    if WIDEN:
        return tl.log2(numbers)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [numbers], tl.float32, is_pure=True, pack=1)


@triton.jit
def tile_weights(peak, logits):
    """The highest logits so far, the weights of one tile, and the factor of what came before it."""
    highest = tl.maximum(peak, tl.max(logits, 1))
    # The tiles so far may be masked out completely.
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
    """a b in float32, never fused with a sum that follows. A sum over threads takes each one's own number and its
    neighbours': fused with the own one it would be rounded otherwise at each, and one place be written twice."""
    if WIDEN:
        return a * b
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)


@triton.jit
def dot(a, b):
    """Matrix product a b in float32, on tensor cores; float32 inputs are not rounded to tf32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    precision: tl.constexpr = "ieee" if a.dtype == tl.float32 else "tf32"
    return tl.dot(a, b, input_precision=precision)
