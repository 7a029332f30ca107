"""`count_left` in Triton: the clusters of chosen keys are counted, then logarithms taken."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.codes.types import WeighedClusters
from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.common.tiles_triton import aligned, wait_for_previous_kernel

KEYS, CLUSTERS, WARPS = 256, 512, 4


@triton.jit(do_not_specialize=["wanted", "keys"])
def _count_kernel(chosen, labels, taken, wanted, keys, C, KEYS: tl.constexpr, EARLY: tl.constexpr):
    """Add the chosen keys of each cluster to `taken`."""
    wait_for_previous_kernel(EARLY)
    head, slot = tl.program_id(1).to(tl.int64), tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    key = tl.load(chosen + head * wanted + slot, mask=slot < wanted, other=0)
    cluster = tl.load(labels + head * keys + key, mask=slot < wanted, other=0)
    tl.atomic_add(taken + head * C + cluster, 1, mask=slot < wanted, sem="relaxed")


@triton.jit
def _left_kernel(
    counts, bias, taken, left, C, counts_stride, bias_stride, stride, CLUSTERS: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_previous_kernel(EARLY)
    head, c = tl.program_id(1).to(tl.int64), tl.program_id(0) * CLUSTERS + tl.arange(0, CLUSTERS)
    number = tl.load(counts + head * counts_stride + c, mask=c < C, other=0)
    number -= tl.load(taken + head * C + c, mask=c < C, other=0)
    log = tl.log(tl.maximum(number, 1).to(tl.float32)) + tl.load(bias + head * bias_stride + c, mask=c < C, other=0.0)
    tl.store(left + head * stride + c, tl.where(number > 0, log, -float("inf")), mask=c < stride)


def count_left_triton(chosen: torch.Tensor, clusters: WeighedClusters, taken: torch.Tensor) -> torch.Tensor:
    """`count_left` on a GPU."""
    (H, K), C, stride = chosen.shape, clusters.counts.shape[1], aligned(clusters.counts.shape[1])
    left, early = torch.empty(H, stride, device=chosen.device), dependent_launch(chosen.device)
    _count_kernel[(triton.cdiv(K, KEYS), H)](
        chosen, clusters.labels, taken, K, clusters.labels.shape[1], C, KEYS=KEYS, num_warps=WARPS, **early
    )
    _left_kernel[(triton.cdiv(stride, CLUSTERS), H)](
        clusters.counts, clusters.bias, taken, left, C, clusters.counts.stride(0), clusters.bias.stride(0), stride,
        CLUSTERS=CLUSTERS, num_warps=WARPS, **early,
    )  # fmt: skip
    return left
