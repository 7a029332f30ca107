"""Attention of several sequences' queries to rows that all of them share, and each to rows of its own.

RelayAttention (arXiv 2402.14808) and Hydragen (arXiv 2402.05099): the queries of all sequences read a shared row once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsekv.kernels.attention.attention import Segment, segment_logits, weigh
from sparsekv.kernels.scores.logits import attention_logits


@dataclass(frozen=True)
class OwnRows:
    """Keys and values [S, Hk, T, D] of S sequences, a head's rows contiguous; and T' tokens that attend to them: the
    sequence `slots` [T'] int64 of each, and the rows that it sees, from first [T'] up to used [T'] int64."""

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    first: torch.Tensor
    used: torch.Tensor

    @property
    def seen(self) -> torch.Tensor:
        """[T', T] bool."""
        rows = torch.arange(self.keys.shape[2], device=self.used.device)
        return (rows >= self.first[:, None]) & (rows < self.used[:, None])


def of_last(keys: torch.Tensor, values: torch.Tensor, tokens: int) -> OwnRows:
    """One sequence's keys and values [Hk, T, D], and its last tokens, each of which sees itself and all before it."""
    used = torch.arange(keys.shape[1] - tokens, keys.shape[1], device=keys.device) + 1
    nothing = torch.zeros_like(used)
    return OwnRows(keys[None], values[None], nothing, nothing, used)


def own_logits(query: torch.Tensor, own: OwnRows, softmax_scale: float, softcap: float | None) -> torch.Tensor:
    """Logits [Hk, G, B, T] float32 of each token's query [Hk, G, B, D] on its own rows; -inf for the others.

    Copies the rows.
    """
    Hk, G, B, _ = query.shape
    each = query.permute(2, 0, 1, 3).flatten(0, 1)[:, :, None]
    logits = attention_logits(each, own.keys[own.slots].flatten(0, 1), softmax_scale, softcap)
    seen = own.seen[:, None, None].expand(-1, Hk, G, -1)
    return logits.view(B, Hk, G, -1).masked_fill(~seen, -torch.inf).permute(1, 2, 0, 3)


def shared_attention(
    query: torch.Tensor,
    shared: Sequence[Segment],
    own: OwnRows,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """One softmax for each query, over the shared segments and the rows of its own sequence, in float32.

    Args:
        query: [Hk, G, B, D].
        shared: their masks and biases broadcast to [Hk, G, B, T].
        sink_logits: [Hk, G] learned logits without values (GPT-OSS).

    Returns:
        [Hk, G, B, D] in the query's dtype. Allocates the logits twice.
    """
    logits = [*segment_logits(query, shared, softmax_scale, softcap), own_logits(query, own, softmax_scale, softcap)]
    if sink_logits is not None:
        logits.append(sink_logits.float()[:, :, None, None].expand(*query.shape[:3], 1))
    weights = torch.cat(logits, -1).softmax(-1).to(query.dtype)
    sizes = [sum(part.shape[-1] for part in logits[: len(shared)]), own.keys.shape[2]]
    everyones, each = weights[..., : sizes[0]], weights[..., sizes[0] : sum(sizes)]
    output = weigh(everyones.flatten(1, 2), [segment.values for segment in shared]).view(*query.shape[:3], -1)
    return output + torch.einsum("hgbt,bhtd->hgbd", each, own.values[own.slots].to(query.dtype))
