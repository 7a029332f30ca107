"""What several Triton kernels share: shapes and shares of work, products, soft caps, how one follows another."""

import torch
import triton
import triton.language as tl

# The interpreter multiplies bfloat16 as the integers that it keeps them in.
WIDEN = tl.constexpr(triton.knobs.runtime.interpret)


def power_of_two(size: int) -> int:
    """The block size that holds so many elements."""
    return 1 << max(size - 1, 0).bit_length()


def group_rows(group: int) -> int:
    """Rows of a tile of query heads: tensor cores take no fewer than 16."""
    return max(16, power_of_two(group))


def tile_rows(head_dim: int, dtype: torch.dtype, size: int) -> int:
    """Rows of a tile of `size` bytes, as far as tensor cores take them: 16 to 128."""
    return min(max(size // (power_of_two(head_dim) * dtype.itemsize), 16), 128)


ALIGNED = 16  # numbers: rows of them that begin so, and are as long, are read four at a time


def aligned(size: int) -> int:
    """The next multiple of `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED


@triton.jit
def share(part, parts, rows):
    """First and last row (not included) of one of the equal parts of some rows; the first ones have one more."""
    size, more = rows // parts, rows % parts
    first = part * size + tl.minimum(part, more)
    return first, first + size + (part < more).to(tl.int32)


@triton.jit
def wait_for_previous_kernel(EARLY: tl.constexpr):
    """Wait for the kernel before this one, where it was launched early, and let the next one be launched.

    The first thing that a program does: before it nothing that other kernels write is there for sure.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def capped(logits, softcap, CAPPED: tl.constexpr):
    """softcap tanh(logits / softcap), where there is a soft cap."""
    if CAPPED:
        # tanh(x) = 2 sigmoid(2 x) - 1: there is no tanh in triton.language.
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits


@triton.jit
def dot(a, b):
    """a b on tensor cores, in float32; float32 itself unrounded."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    precision: tl.constexpr = "ieee" if a.dtype == tl.float32 else "tf32"
    return tl.dot(a, b, input_precision=precision)
