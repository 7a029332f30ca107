"""`attention_shares` in Triton: one kernel computes each query's log-sum-exp, the next sums each key's weights."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.launch import count_sms, dependent_launch, power_of_two, tile_rows, unit_stride
from sparsekv.kernels.common.tiles_triton import LOG2_E

ROWS, TILE_BYTES, WARPS, STAGES = 64, 32_768, 8, 2
PROGRAMS_PER_SM = 2


@triton.jit
def _logits(rows, others, softmax_scale, softcap, CAPPED: tl.constexpr):
    """Compute the logits of rows [A, D] and others [B, D] in units of log 2: [A, B]."""
    return common.capped(common.dot(rows, tl.trans(others)) * softmax_scale, softcap, CAPPED) * LOG2_E


@triton.jit(do_not_specialize=["R", "N", "U"])
def _logsumexp_kernel(
    query, keys, own, seen, found, R, N, U, query_stride, key_stride, own_stride, softmax_scale, softcap,
    CAPPED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute log-sum-exps of ROWS queries over a part of the stored keys; the last part includes the keys in `own`."""
    common.wait_for_previous_kernel(EARLY)
    part, parts = tl.program_id(0), tl.num_programs(0)
    r, d, t = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    q = tl.load(query + r[:, None] * query_stride + d, mask=(r < R)[:, None] & (d < D), other=0.0)
    peak, total = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    first, last = common.share(part, parts, N)
    for at in tl.range(first, last, TILE, num_stages=STAGES):
        inside = at + t < last
        place = keys + (at + t)[:, None].to(tl.int64) * key_stride + d
        k = tl.load(place, mask=inside[:, None] & (d < D), other=0.0)
        logits = tl.where(inside[None], _logits(q, k, softmax_scale, softcap, CAPPED), -float("inf"))
        peak, weights, shrink = common.tile_weights(peak, logits)
        total = total * shrink + tl.sum(weights, 1)
    if part == parts - 1:
        sees = tl.load(seen + r, mask=r < R, other=0).to(tl.int32)
        for at in tl.range(0, U, TILE):
            k = tl.load(own + (at + t)[:, None] * own_stride + d, mask=(at + t < U)[:, None] & (d < D), other=0.0)
            logits = _logits(q, k, softmax_scale, softcap, CAPPED)
            logits = tl.where((at + t)[None] < sees[:, None], logits, -float("inf"))
            peak, weights, shrink = common.tile_weights(peak, logits)
            total = total * shrink + tl.sum(weights, 1)
    tl.store(found + r * parts + part, (peak + tl.log2(total)) / LOG2_E, mask=r < R)


@triton.jit(do_not_specialize=["R", "N"])
def _shares_kernel(
    query, keys, totals, weights, shares, R, N, query_stride, key_stride, softmax_scale, softcap,
    CAPPED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sum the softmax weights of a tile of stored keys over all queries, weighted by the queries' factors."""
    common.wait_for_previous_kernel(EARLY)
    n, d, t = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D), tl.arange(0, ROWS)
    k = tl.load(keys + n[:, None].to(tl.int64) * key_stride + d, mask=(n < N)[:, None] & (d < D), other=0.0)
    found = tl.zeros([TILE], tl.float32)
    for at in tl.range(0, R, ROWS, num_stages=STAGES):
        r = at + t
        q = tl.load(query + r[:, None] * query_stride + d, mask=(r < R)[:, None] & (d < D), other=0.0)
        total = tl.load(totals + r, mask=r < R, other=0.0) * LOG2_E
        weight = tl.load(weights + r, mask=r < R, other=0.0)
        logits = _logits(k, q, softmax_scale, softcap, CAPPED)
        found += tl.sum(common.exp2_flushed(logits - total[None]) * weight[None], 1)
    tl.store(shares + n, found, mask=n < N)


def attention_shares_triton(query, keys, own, seen, weights, softmax_scale, softcap=None, sink=None):
    """Run `attention_shares` on a GPU; allocates one float32 number for each query and part of the keys."""
    (R, D), (N, U), device = query.shape, (len(keys), len(own)), query.device
    query, keys, own = (unit_stride(rows) for rows in (query, keys, own))
    tile, blocks = tile_rows(D, query.dtype, TILE_BYTES), triton.cdiv(R, ROWS)
    parts = max(1, min(triton.cdiv(N, tile), PROGRAMS_PER_SM * count_sms(device) // blocks))
    partial, shares = torch.empty(R, parts, device=device), torch.empty(N, device=device)
    sizes = {"D": D, "BLOCK_D": power_of_two(D), "ROWS": ROWS, "TILE": tile, "STAGES": STAGES, "num_warps": WARPS}
    scaling = {"softmax_scale": softmax_scale, "softcap": softcap or 0.0, "CAPPED": softcap is not None}
    _logsumexp_kernel[(parts, blocks)](
        query, keys, own, seen, partial, R, N, U, query.stride(0), keys.stride(0), own.stride(0),
        **scaling, **sizes, **dependent_launch(device),
    )  # fmt: skip
    totals = partial.logsumexp(1)
    totals = totals if sink is None else torch.logaddexp(totals, sink.float())
    _shares_kernel[(triton.cdiv(N, tile),)](
        query, keys, totals, weights, shares, R, N, query.stride(0), keys.stride(0),
        **scaling, **sizes, **dependent_launch(device),
    )  # fmt: skip
    return shares
