"""One decode step of several sequences over one document: a few kernels read what is shared once, and in place.

Attention to what is shared and to each sequence's own rows are two softmaxes, merged by their log-sum-exps, as in
RelayAttention (arXiv 2402.14808) and Hydragen (arXiv 2402.05099).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from sparsekv.kernels.attention.decode_attention import decode_attention
from sparsekv.kernels.attention.shared_attention import OwnRows
from sparsekv.kernels.attention.types import RunRows, ScoredCentroids

QUERY_NUMBERS = 8192
"""Numbers of all queries that a program holds at once: 64 rows of 128, beside their outputs in registers."""


def shared_decode(
    query: torch.Tensor,
    runs: RunRows,
    exact: tuple[torch.Tensor, torch.Tensor],
    stand_ins: Sequence[ScoredCentroids],
    own: OwnRows,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """One softmax for each query, over shared runs, exact rows and centroids, and over its sequence's own rows.

    Args:
        query: [Hk, G, B, D], one query a sequence.
        exact: keys and values [Hk, E, D] that all attend to.
        stand_ins: centroids that all attend to, with logits [Hk, B G, C] of all queries, sequence by sequence.
        own: of the B sequences.
        sink_logits: [Hk, G] learned logits without values (GPT-OSS).

    Returns:
        [Hk, G, B, D] in the query's dtype. No synchronisation, no shapes that depend on data.
    """
    Hk, G, B, D = query.shape
    rows = query.permute(0, 2, 1, 3).reshape(Hk, B * G, D)
    sinks = None if sink_logits is None else sink_logits.float().repeat(1, B)
    output, total = _shared_attention(rows, G, runs, exact, stand_ins, softmax_scale, softcap, sinks)
    output, total = output.view(Hk, B, G, D), total.view(Hk, B, G)
    each, each_total = _own_attention(query, own, softmax_scale, softcap)
    highest = torch.maximum(total, each_total)
    weights = [(one - highest).exp()[..., None] for one in (total, each_total)]
    # Where nothing is shared, its output is not a number.
    everyones = torch.where(weights[0] > 0, output, 0.0)
    merged = (everyones * weights[0] + each * weights[1]) / (weights[0] + weights[1])
    return merged.to(query.dtype).transpose(1, 2)


def _shared_attention(
    rows: torch.Tensor,
    group: int,
    runs: RunRows,
    exact: tuple[torch.Tensor, torch.Tensor],
    stand_ins: Sequence[ScoredCentroids],
    softmax_scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [Hk, B G, D] and log-sum-exps [Hk, B G] of all queries, rows [Hk, B G, D], on what is shared."""
    D = rows.shape[2]
    most = max(group, QUERY_NUMBERS // (1 << (D - 1).bit_length()) // group * group)
    outputs, totals = [], []
    for first in range(0, rows.shape[1], most):
        part = slice(first, first + most)
        totals.append(rows.new_empty(*rows[:, part].shape[:2], dtype=torch.float32))
        outputs.append(
            decode_attention(
                rows[:, part].contiguous(),
                replace(runs, queue=None),
                exact,
                [replace(one, logits=one.logits[:, part].contiguous()) for one in stand_ins],
                softmax_scale,
                softcap,
                None if sinks is None else sinks[:, part].contiguous(),
                logsumexp=totals[-1],
            )
        )
    return torch.cat(outputs, 1), torch.cat(totals, 1)


def _own_attention(
    query: torch.Tensor, own: OwnRows, softmax_scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [Hk, B, G, D] and log-sum-exps [Hk, B, G] of each sequence's query [Hk, G, B, D] on its own rows."""
    Hk, G, B, D = query.shape
    each = query.permute(2, 0, 1, 3).reshape(B * Hk, G, D)
    keys, values = own.keys.flatten(0, 1), own.values.flatten(0, 1)
    starts, ends = (
        count.repeat_interleave(Hk)[:, None].to(torch.int32).contiguous() for count in (own.first, own.used - own.first)
    )
    total = query.new_empty(B * Hk, G, dtype=torch.float32)
    runs, nothing = RunRows(keys, values, starts, ends, keys.shape[1]), (keys[:, :0], values[:, :0])
    output = decode_attention(each, runs, nothing, (), softmax_scale, softcap, logsumexp=total)
    return output.view(B, Hk, G, D).transpose(0, 1), total.view(B, Hk, G).transpose(0, 1)
