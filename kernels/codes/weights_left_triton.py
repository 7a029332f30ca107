"""`weights_left` in Triton."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.codes.types import WeighedClusters
from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.common.tiles_triton import aligned, wait_for_previous_kernel

CLUSTERS, WARPS = 512, 4


@triton.jit
def _left_kernel(
    counts, bias, taken, left, C, counts_stride, bias_stride, stride, CLUSTERS: tl.constexpr, EARLY: tl.constexpr
):
    head, c = tl.program_id(1).to(tl.int64), tl.program_id(0) * CLUSTERS + tl.arange(0, CLUSTERS)
    number = tl.load(counts + head * counts_stride + c, mask=c < C, other=0)
    factor = tl.load(bias + head * bias_stride + c, mask=c < C, other=0.0)
    wait_for_previous_kernel(EARLY)
    number -= tl.load(taken + head * C + c, mask=c < C, other=0)
    log = tl.log(tl.maximum(number, 1).to(tl.float32)) + factor
    tl.store(left + head * stride + c, tl.where(number > 0, log, -float("inf")), mask=c < stride)


def weights_left_triton(clusters: WeighedClusters, taken: torch.Tensor) -> torch.Tensor:
    """`weights_left` on a GPU."""
    (H, C), stride = clusters.counts.shape, aligned(clusters.counts.shape[1])
    left = torch.empty(H, stride, device=taken.device)
    _left_kernel[(triton.cdiv(stride, CLUSTERS), H)](
        clusters.counts, clusters.bias, taken, left, C, clusters.counts.stride(0), clusters.bias.stride(0), stride,
        CLUSTERS=CLUSTERS, num_warps=WARPS, **dependent_launch(taken.device),
    )  # fmt: skip
    return left
