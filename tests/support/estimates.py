"""What a choice by estimated logits has to be, in float64: exact logits, and a group's mean probability."""

import torch

from sparsekv.formats.index.schema import LayerFacts


def double_logits(query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
    """[Hk, G, Q, T] float64 of queries [Hk, G, Q, D] on keys [Hk, T, D], or on keys of each query [Hk, Q, T, D]."""
    each = keys if keys.ndim == 4 else keys[:, None].expand(-1, query.shape[2], -1, -1)
    logits = facts.softmax_scale * torch.einsum("hgqd,hqtd->hgqt", query.double(), each.double())
    return logits if facts.softcap is None else facts.softcap * torch.tanh(logits / facts.softcap)


def group_scores(logits: torch.Tensor, exact: torch.Tensor, *, shared: bool = False) -> torch.Tensor:
    """[Hk, Q, M], or [Hk, 1, M] where a choice is shared: the mean of a group's probabilities.

    Args:
        logits: [Hk, G, Q, M] float64, on the middle.
        exact: [Hk, G, Q], the log-sum-exp of what else is attended.
    """
    everything = torch.cat([logits, exact.double()[..., None]], -1).softmax(-1)[..., :-1]
    return everything.mean((1, 2))[:, None] if shared else everything.mean(1)
