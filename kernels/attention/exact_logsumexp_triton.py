"""`exact_logsumexp` in Triton: a program has one token's queries of a head. Logits are in units of log 2."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.attention.running_softmax_triton import tile_logits, tile_weights
from sparsekv.kernels.attention.shared_attention import OwnRows
from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.common.tiles_triton import (
    LOG2_E,
    dot,
    group_rows,
    power_of_two,
    tile_rows,
    wait_for_previous_kernel,
)

TILE_BYTES, WARPS = 16_384, 4


@triton.jit
def _add_keys(
    peak, total, q, keys, first, stop, t, d, scale, softmax_scale, softcap,
    CAPPED: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The running peak and sum of exponentials [GROUP] with those of the keys from first up to stop."""
    for at in range(first, stop, TILE):
        inside = at + t < stop
        k = tl.load(keys + (at + t)[:, None] * D + d, mask=inside[:, None] & (d < D), other=0.0)
        bias = tl.where(inside, 0.0, -float("inf"))
        logits = tile_logits(dot(q, tl.trans(k)), bias, scale, softmax_scale, softcap, CAPPED)
        peak, weights, shrink = tile_weights(peak, logits)
        total = total * shrink + tl.sum(weights, 1)
    return peak, total


@triton.jit(do_not_specialize=["E"])
def _logsumexp_kernel(
    query, keys, own_keys, slots, starts, ends, sink_logits, totals,
    E, q_head, q_group, q_token, key_stride, slot_stride, own_stride, softmax_scale, softcap,
    CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    token, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    place = query + head * q_head + g[:, None] * q_group + token * q_token
    q = tl.load(place + d, mask=(g < G)[:, None] & (d < D), other=0.0)
    peak, total = tl.full([GROUP], -float("inf"), tl.float32), tl.zeros([GROUP], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sink_logits + head * G + g, mask=g < G, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    scale = softmax_scale * LOG2_E
    peak, total = _add_keys(
        peak, total, q, keys + head * key_stride, 0, E, t, d, scale, softmax_scale, softcap, CAPPED, D, TILE
    )
    own = own_keys + tl.load(slots + token) * slot_stride + head * own_stride
    first, stop = tl.load(starts + token).to(tl.int32), tl.load(ends + token).to(tl.int32)
    peak, total = _add_keys(peak, total, q, own, first, stop, t, d, scale, softmax_scale, softcap, CAPPED, D, TILE)
    result = (peak + tl.log2(total)) / LOG2_E
    tl.store(totals + (head * G + g) * tl.num_programs(0) + token, result, mask=g < G)


def exact_logsumexp_triton(
    query: torch.Tensor,
    keys: torch.Tensor,
    own: OwnRows,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """`exact_logsumexp` on a GPU. Allocates the result alone."""
    (H, G, B, D), device = query.shape, query.device
    query = query if query.stride(3) == 1 else query.contiguous()
    totals = torch.empty(H, G, B, device=device)
    _logsumexp_kernel[(B, H)](
        query, keys, own.keys, own.slots, own.first, own.used,
        query if sink_logits is None else sink_logits.contiguous(), totals,
        keys.shape[1], *query.stride()[:3], keys.stride(0), *own.keys.stride()[:2], softmax_scale, softcap or 0.0,
        CAPPED=softcap is not None, HAS_SINKS=sink_logits is not None, G=G, GROUP=group_rows(G), D=D,
        BLOCK_D=power_of_two(D), TILE=tile_rows(D, query.dtype, TILE_BYTES), num_warps=WARPS,
        **dependent_launch(device),
    )  # fmt: skip
    return totals
