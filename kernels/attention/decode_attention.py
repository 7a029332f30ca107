"""Attention of one decode step over chosen rows, rows that are always attended, and centroids, in one softmax.

Several sequences share a document's rows through kernels that read these rows once and in place.
"""

from collections.abc import Sequence

import torch

from sparsekv.kernels.attention.attention import OwnRows, Segment, own_logits, shared_attention
from sparsekv.kernels.common.kernel_inputs import Centroids, RunRows, ScoredCentroids
from sparsekv.kernels.common.on_gpu import on_gpu
from sparsekv.kernels.common.row_operations import expand_runs
from sparsekv.kernels.scores.logits import attention_logits


@on_gpu("sparsekv.kernels.attention.decode_attention_triton:decode_attention_triton")
def decode_attention(
    query: torch.Tensor,
    runs: RunRows,
    exact: tuple[torch.Tensor, torch.Tensor],
    centroids: Sequence[ScoredCentroids],
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    exact_count: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to chosen rows, exact rows and centroids that represent rows, in one softmax.

    Every query attends to the exact rows: the document's first tokens (sinks), its last tokens (tail), and new tokens.
    On a GPU this is flash-decoding. The work of a KV head is split evenly over programs, even if the runs have uneven
    lengths. If `runs` has a `queue`, programs that finish early take some of the rows. Each program computes all G
    query heads of the KV head. There are two or three launches, no data-dependent shapes and no synchronisation. The
    plain-torch implementation copies the rows.

    Args:
        query: [H, G, D].
        runs: the chosen rows.
        exact: keys and values [H, E, D] that are always attended. The rows of a head are contiguous; heads may have
            any stride, on a GPU the same for keys and values.
        centroids: sets of centroids. The heads of their values may have any stride. On a GPU at most one set may have
            `rows`. A set with `scales` or `clusters` must have no `rows`, and must be the only set without `rows`. A
            set with `scales` also needs `runs.scales`.
        sink_logits: [H, G] learned logits that take part in the softmax and have no value row.
        exact_count: [1] int32 on the query's device, the number of valid rows among the E exact rows; None: all.

    Returns:
        [H, G, D] in the query's dtype.
    """
    lengths = _single_rows(runs) if runs.ends is None else lengths_of(runs.ends)
    rows, valid = expand_runs(runs.starts, lengths, runs.capacity)
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, values = runs.gathered(rows, wide)
    if exact_count is not None:
        exact = exact[0][:, : int(exact_count)], exact[1][:, : int(exact_count)]
    chosen, always = (
        attention_logits(query[:, :, None], each, softmax_scale, softcap)[:, :, 0] for each in (keys, exact[0])
    )
    logits = [chosen.masked_fill(~valid[:, None], -torch.inf), always, *(part.weighted_logits() for part in centroids)]
    if sink_logits is not None:
        logits.append(sink_logits.float()[..., None])
    all_values = torch.cat([values, exact[1], *(part.gathered() for part in centroids)], 1).to(wide)
    weights = torch.cat(logits, -1).softmax(-1)[..., : all_values.shape[1]]
    return (weights.to(all_values.dtype) @ all_values).to(query.dtype)


def _single_rows(runs: RunRows) -> torch.Tensor:
    """Return the lengths [H, R] of runs of one row each; 0 for unused runs."""
    used = runs.starts.new_full(runs.starts.shape[:1], runs.capacity) if runs.used is None else runs.used
    return (torch.arange(runs.starts.shape[1], device=runs.starts.device) < used[:, None]).int()


def lengths_of(ends: torch.Tensor) -> torch.Tensor:
    """Compute the lengths [H, R] of runs from their running sums."""
    return ends.diff(dim=-1, prepend=torch.zeros_like(ends[:, :1]))


@on_gpu("sparsekv.kernels.attention.shared_decode_triton:shared_logsumexp_triton")
def shared_logsumexp(
    query: torch.Tensor,
    keys: torch.Tensor,
    own: OwnRows,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the log-sum-exp of each query's logits for shared keys, its own sequence's keys and learned sinks.

    On a GPU this is one launch that copies no keys. The plain-torch implementation copies a sequence's keys for each of
    its tokens.

    Args:
        query: [Hk, G, B, D] of B tokens.
        keys: [Hk, E, D]; a head's rows are contiguous.
        own: rows of each token's own sequence, for the B tokens.
        sink_logits: [Hk, G] learned logits without values (GPT-OSS).

    Returns:
        [Hk, G, B] float32; minus infinity if a query has no logits.
    """
    shared = attention_logits(query, keys, softmax_scale, softcap)
    total = torch.cat([shared, own_logits(query, own, softmax_scale, softcap)], -1).logsumexp(-1)
    return total if sink_logits is None else torch.logaddexp(total, sink_logits[..., None].float())


@on_gpu("sparsekv.kernels.attention.shared_decode_triton:shared_decode_triton")
def shared_decode(
    query: torch.Tensor,
    runs: RunRows,
    exact: tuple[torch.Tensor, torch.Tensor],
    centroids: Sequence[Centroids],
    own: OwnRows,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with each query to shared chosen rows, exact rows and centroids, and to its own sequence, in one softmax.

    Exact rows are read without row indices: the document's first tokens (sinks) and last tokens (tail), or, for dense
    attention, all of its rows. On a GPU there are three launches, and a call of FlashAttention-3 if it takes the exact
    rows. There is no synchronisation, and no shape depends on data. The plain-torch implementation copies the rows.

    Args:
        query: [Hk, G, B, D] of B tokens.
        runs: chosen rows that all tokens attend to, as single rows (`ends` is None).
        exact: keys and values [Hk, E, D] that all tokens attend to. The rows of a head are contiguous; heads may have
            any stride.
        centroids: at most one set of centroids that all tokens attend to.
        own: rows of each token's own sequence, for the B tokens. On a GPU, keys and values have equal strides within
            `own`, within `runs` and within `exact`.
        sink_logits: [Hk, G] learned logits without values (GPT-OSS).

    Returns:
        [Hk, G, B, D] in the query's dtype.
    """
    assert len(centroids) <= 1
    rows = runs.starts[:, : runs.capacity].long()
    used = rows.new_full(rows.shape[:1], runs.capacity) if runs.used is None else runs.used
    valid = torch.arange(rows.shape[1], device=rows.device) < used[:, None]
    of_rows = runs.gathered(torch.where(valid, rows, 0), torch.promote_types(query.dtype, torch.float32))
    chosen = Segment(*of_rows, valid[:, None, None])
    stood = [
        Segment(part.keys, part.values, bias=part.log_counts[:, None, None, : part.keys.shape[1]]) for part in centroids
    ]
    return shared_attention(query, [chosen, Segment(*exact), *stood], own, softmax_scale, softcap, sink_logits)
