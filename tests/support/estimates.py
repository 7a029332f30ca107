"""Exact logits and mean probabilities in float64, the reference for choices by estimated logits."""

import torch

from sparsekv.formats.index.schema import LayerFacts


def double_logits(query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
    """Return the logits [Hk, G, Q, T] float64 of queries [Hk, G, Q, D].

    The keys are [Hk, T, D], or [Hk, Q, T, D] if each query has keys of its own.
    """
    each = keys if keys.ndim == 4 else keys[:, None].expand(-1, query.shape[2], -1, -1)
    logits = facts.softmax_scale * torch.einsum("hgqd,hqtd->hgqt", query.double(), each.double())
    return logits if facts.softcap is None else facts.softcap * torch.tanh(logits / facts.softcap)


def group_scores(logits: torch.Tensor, exact: torch.Tensor, *, shared: bool = False) -> torch.Tensor:
    """Return the mean of a group's probabilities: [Hk, Q, M], or [Hk, 1, M] over all queries if the choice is `shared`.

    Args:
        logits: [Hk, G, Q, M] float64, for the middle's tokens.
        exact: [Hk, G, Q], the log-sum-exp of the logits on exact rows and sinks.
    """
    everything = torch.cat([logits, exact.double()[..., None]], -1).softmax(-1)[..., :-1]
    return everything.mean((1, 2))[:, None] if shared else everything.mean(1)
