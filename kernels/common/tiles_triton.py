"""Helpers of several Triton kernels: tile shapes, shares of work, products, soft caps, dependent launches."""

import math

import torch
import triton
import triton.language as tl

# The interpreter stores bfloat16 as integers, and would multiply those.
WIDEN = tl.constexpr(triton.knobs.runtime.interpret)
# Logits times this are exponents of 2: a power of 2 takes one instruction less than one of e.
LOG2_E = tl.constexpr(math.log2(math.e))


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def group_rows(group: int) -> int:
    """Rows of a tile that holds a group of query heads: tensor cores need at least 16."""
    return max(16, power_of_two(group))


def tile_rows(head_dim: int, dtype: torch.dtype, size: int) -> int:
    """Rows of a tile of `size` bytes, limited to 16 to 128."""
    return min(max(size // (power_of_two(head_dim) * dtype.itemsize), 16), 128)


ALIGNED = 16  # elements: rows whose start and length are multiples of this can be read four elements at a time


def aligned(size: int) -> int:
    """The next multiple of `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED


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
    if EARLY:
        tl.extra.cuda.gdc_wait()
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


LARGEST_HALF = tl.constexpr(65504.0)
# Bytes of 0 to 255 after 0x64 are float16 numbers of 1024 to 1279. So four whole numbers take five instructions; the
# conversion that a GPU has takes one for each at a quarter of the speed.
_HALVES = tl.constexpr(
    "{ .reg .b32 bytes, middle; xor.b32 bytes, $2, 0x80808080; mov.b32 middle, 0x64806480;"
    " prmt.b32 $0, bytes, 0x64646464, 0x4140; prmt.b32 $1, bytes, 0x64646464, 0x4342;"
    " sub.f16x2 $0, $0, middle; sub.f16x2 $1, $1, middle; }"
)


@triton.jit
def floats_of(numbers, EXACT: tl.constexpr):
    """Numbers of 8 bits as float16, which holds them exactly; with EXACT as float32."""
    if EXACT or WIDEN:
        return numbers.to(tl.float32)
    # Said to be impure, so that Triton converts numbers as they were loaded: a matrix product's layout would have it
    # fetch values from shared memory byte by byte.
    return tl.inline_asm_elementwise(_HALVES, "=r,=r,r", [numbers], tl.float16, is_pure=False, pack=4)


@triton.jit
def channel_scaled(q, channels, offsets, d, in_row, scale):
    """Queries [R, D] times the scales of the channels of keys in 8 bits, each query over its largest number, so that
    float16 holds it; these largest numbers [R], and the queries' products [R] with the channels' offsets, both times
    the scale of logits."""
    exact = q.to(tl.float32)
    scaled = exact * tl.load(channels + d, mask=in_row, other=0.0).to(tl.float32)[None, :]
    products = tl.sum(exact * tl.load(offsets + d, mask=in_row, other=0.0).to(tl.float32)[None, :], 1)
    largest = tl.max(tl.abs(scaled), 1)
    largest = tl.where(largest == 0.0, 1.0, largest)
    scaled = scaled / largest[:, None]
    if q.dtype != tl.float32:
        scaled = scaled.to(tl.float16)
    return scaled, largest * scale, products * scale


@triton.jit
def dot(a, b):
    """Matrix product a b in float32, on tensor cores; float32 inputs are not rounded to tf32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    precision: tl.constexpr = "ieee" if a.dtype == tl.float32 else "tf32"
    return tl.dot(a, b, input_precision=precision)
