"""Selecting single tokens from exact or estimated logits: shared by the methods without clusters or pages."""

import torch

from sparsekv.formats.schema import LayerFacts
from sparsekv.kernels.scores.best import best_tokens
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.kernels.scores.softmax import softmax_beside
from sparsekv.runtime.selection.queries import Queries
from sparsekv.runtime.selection.selection import Cost, Selection, single_rows


def group_probability(logits: torch.Tensor, queries: Queries) -> torch.Tensor:
    """Softmax probabilities of the middle's tokens, averaged over the group and over queries that select jointly.

    The softmax includes the rows that are attended exactly, so that heads and queries are weighted correctly.

    Args:
        logits: [Hk, G, Q, M] float32.

    Returns:
        [Hk, Q, M], or [Hk, 1, M] for a joint selection.
    """
    probability = softmax_beside(logits, queries.exact_logsumexp()).mean(1)
    return probability.mean(1, keepdim=True) if queries.joint else probability


def token_logits(query: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
    """Exact logits of the queries on candidate tokens.

    Args:
        query: [Hk, G, Q, D].
        keys: [Hk, M, D].
        tokens: [Hk, Q or 1, S].

    Returns:
        [Hk, G, Q, S] float32. Allocates a copy of the tokens' keys.
    """
    Hk, G, Q, D = query.shape
    rows = tokens.flatten(1)[..., None].expand(-1, -1, D)
    chosen = keys.gather(1, rows).view(*tokens.shape, D)
    if tokens.shape[1] == 1:
        return attention_logits(query, chosen[:, 0], facts.softmax_scale, facts.softcap)
    each = query.transpose(1, 2).flatten(0, 1)[:, :, None]
    logits = attention_logits(each, chosen.flatten(0, 1), facts.softmax_scale, facts.softcap)
    return logits.view(Hk, Q, G, -1).transpose(1, 2)


def top_tokens(scores: torch.Tensor, tokens: int, index_rows: torch.Tensor | float) -> Selection:
    """The selection of the tokens with the highest scores.

    Args:
        scores: [Hk, Q, M].
        tokens: how many, at most M.
        index_rows: D-sized rows of each head that were read to score them.
    """
    starts = best_tokens(scores, tokens)
    return Selection(single_rows(starts), Cost(index_rows))
