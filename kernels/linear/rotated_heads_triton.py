"""`rotated_heads` in Triton: one launch instead of several between two products, a program for each head."""

import triton
import triton.language as tl

from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.launch import dependent_launch, power_of_two


@triton.jit
def _rotate_kernel(
    channels, cos, sin, query_norm, key_norm, output, queries, query_epsilon, key_epsilon,
    NORM: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rotate one head of D channels. Its intermediate values are float32."""
    head, d = tl.program_id(0), tl.arange(0, BLOCK_D)
    inside = d < D
    is_first = d < D // 2
    other = tl.where(is_first, d + D // 2, d - D // 2)
    common.wait_for_previous_kernel(EARLY)
    x = tl.load(channels + head * D + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(channels + head * D + other, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        norm, epsilon = query_norm, query_epsilon
        if head >= queries:
            norm, epsilon = key_norm, key_epsilon
        scale = tl.rsqrt(tl.sum(x * x) / D + epsilon)
        x *= scale * tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
        y *= scale * tl.load(norm + other, mask=inside, other=0.0).to(tl.float32)
    rotated = x * tl.load(cos + d, mask=inside, other=0.0).to(tl.float32)
    rotated += tl.where(is_first, -y, y) * tl.load(sin + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + head * D + d, rotated.to(output.dtype.element_ty), mask=inside)


def rotated_heads_triton(channels, queries, cos, sin, norms):
    """Run `rotated_heads` on a GPU; allocates the output alone."""
    channels, cos, sin, D = channels.contiguous(), cos.contiguous(), sin.contiguous(), len(cos)
    output = channels.new_empty(channels.numel() // D, D)
    weights = [norm.weight for norm in norms] or [channels] * 2
    epsilons = [norm.epsilon for norm in norms] or [0.0] * 2
    _rotate_kernel[(len(output),)](
        channels, cos, sin, *weights, output, queries, *epsilons,
        NORM=bool(norms), D=D, BLOCK_D=power_of_two(D), num_warps=1, **dependent_launch(channels.device),
    )  # fmt: skip
    return output
