"""Helpers of the methods that select single tokens: by logits, by a fixed ranking, or by an earlier layer's ranking."""

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import cast

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import LayerFacts
from sparsekv.kernels.scores.logits import attention_logits, best_tokens, softmax_beside
from sparsekv.runtime.selection.interface import (
    Budget,
    Cost,
    LayerPosition,
    Method,
    MiddleContext,
    Queries,
    RowSet,
    Selection,
    Selector,
    is_piece,
    single_rows,
)


def ranking(scores: torch.Tensor) -> torch.Tensor:
    """Return the indices [..., M] of tokens by descending score. Tokens with equal scores are in order of position."""
    return scores.argsort(dim=-1, descending=True, stable=True)


class KeptTokens(Selector):
    """Selects the first tokens of a fixed ranking.

    `order` [Hk, M] int64 has token positions, counted from the first token after the sinks, best first. Selecting reads
    no index rows.
    """

    def __init__(self, order: torch.Tensor):
        self.order = order

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select the same tokens for every query: the first of the ranking up to the budget."""
        tokens = budget.tokens(self.order.shape[1])
        starts = self.order[:, None, :tokens].expand(-1, 1 if queries.joint else queries.query.shape[2], -1)
        return Selection(single_rows(starts), Cost(0.0))


FULL_LAYERS = 2
RULE_OF_THUMB = 13 / 32  # depth of the second ranking layer: layer 13 of 32 in the published code
Rankings = dict[int, torch.Tensor]


@dataclass(frozen=True)
class LayerSharing(Method):
    """A method in which two layers rank tokens for the layers after them.

    The two ranking layers and the first FULL_LAYERS layers attend to all rows.
    """

    select_layer: int = field(
        default=0,
        metadata={
            "help": (
                "Layer, counted from 0, that attends to all tokens and selects the tokens for all layers after it. "
                "Layer 2 selects for the layers between layer 2 and this layer. 0: the layer at 13/32 of the model's "
                "depth."
            )
        },
    )

    def __post_init__(self) -> None:
        if self.select_layer < 0 or 0 < self.select_layer <= FULL_LAYERS:
            raise UsageError(
                f"--select-layer {self.select_layer}: the first {FULL_LAYERS} layers attend to all tokens, and "
                f"the layer after them selects at the earliest; give {FULL_LAYERS + 1} or more, or 0 for the "
                "layer at 13/32 of the depth"
            )

    def selecting_layers(self, position: LayerPosition) -> tuple[int, int]:
        """Return the two layers that rank tokens for later layers; in a model of few layers they can be the same.

        Raises:
            UsageError: the index has no layer `select_layer`.
        """
        if self.select_layer >= position.layers:
            raise UsageError(
                f"--select-layer {self.select_layer}: the index has {position.layers} layers, counted from 0; "
                "give a smaller number"
            )
        return FULL_LAYERS, self.select_layer or max(FULL_LAYERS, round(RULE_OF_THUMB * position.layers))


class SharingSelector(Selector):
    """Selector of one layer of a `LayerSharing` method.

    A ranking layer stores an int32 ranking of its M tokens for each `Queries.batch`. Later layers read this ranking.
    """

    def __init__(self, method: LayerSharing, context: MiddleContext, name: str):
        position = context.position
        self.keys, self.facts = context.keys, context.facts
        self.ranks = position.number in method.selecting_layers(position)
        self.full = self.ranks or position.number < FULL_LAYERS
        self.last = position.number == position.layers - 1
        self.rankings = cast(Rankings, position.shared.setdefault(name, {}))

    @abstractmethod
    def rank(self, queries: Queries) -> torch.Tensor:
        """Rank the M tokens, best first: [Hk or 1, Q, M], or [Hk or 1, 1, M] for a joint selection."""

    def best(self, order: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the K = `tokens` tokens [..., K] to attend to, from a ranking [..., M]."""
        return order[..., :tokens]

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select all tokens in the first layers and in ranking layers, else the best tokens of the latest ranking.

        If no ranking is stored for these queries, the layer ranks its tokens itself.
        """
        if self.ranks:
            self.rankings[queries.batch] = self.rank(queries).int()
        if self.full:
            return self._everything(queries)
        order, index_rows = self.rankings.get(queries.batch), 0.0
        if self.last and is_piece(queries.batch):
            self.rankings.pop(queries.batch, None)  # no later layer needs this ranking
        if order is None:
            order, index_rows = self.rank(queries), float(self.keys.shape[1])
        tokens = budget.tokens(self.keys.shape[1])
        starts = self.best(order, tokens).expand(len(self.keys), -1, -1)
        return Selection(single_rows(starts), Cost(index_rows))

    def _everything(self, queries: Queries) -> Selection:
        Hk, _, Q, _ = queries.query.shape
        starts = torch.zeros(Hk, 1 if queries.joint else Q, 1, dtype=torch.int64, device=self.keys.device)
        middle = self.keys.shape[1]
        return Selection(RowSet(starts, starts + middle, middle), Cost(0.0))


def group_probability(logits: torch.Tensor, queries: Queries) -> torch.Tensor:
    """Compute the softmax probabilities of M tokens, averaged over the group and over queries that select jointly.

    The softmax includes the rows that are always attended to, so that heads and queries get their correct weights.

    Args:
        logits: [Hk, G, Q, M] float32.

    Returns:
        [Hk, Q, M], or [Hk, 1, M] for a joint selection.
    """
    probability = softmax_beside(logits, queries.exact_logsumexp()).mean(1)
    return probability.mean(1, keepdim=True) if queries.joint else probability


def token_logits(query: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
    """Compute exact logits of the queries on candidate tokens.

    Args:
        query: [Hk, G, Q, D].
        keys: [Hk, M, D].
        tokens: [Hk, Q or 1, S], indices of S candidates for each query, or for all queries.

    Returns:
        [Hk, G, Q, S] float32. Allocates a copy of the tokens' keys.
    """
    Hk, G, Q, D = query.shape
    rows = tokens.flatten(1)[..., None].expand(-1, -1, D)
    chosen = keys.gather(1, rows).view(*tokens.shape, D)
    if tokens.shape[1] == 1:
        return attention_logits(query, chosen[:, 0], *facts.scaling)
    each = query.transpose(1, 2).flatten(0, 1)[:, :, None]
    logits = attention_logits(each, chosen.flatten(0, 1), *facts.scaling)
    return logits.view(Hk, Q, G, -1).transpose(1, 2)


def rerank_scores(logits: torch.Tensor, totals: torch.Tensor, *, joint: bool) -> torch.Tensor:
    """Compute scores by which candidates are re-ranked: logarithms of their probabilities, summed over the group.

    The probabilities themselves can all be 0 in float32, because an estimated log-sum-exp may be far too large. An
    estimate that is too small would give its query head too much weight.

    Args:
        logits: [Hk, G, Q, S], exact logits of S candidates.
        totals: [Hk, G, Q], estimated log-sum-exps of the queries' logits on everything that they attend to. A total
            below the log-sum-exp of the candidates is raised to it.
        joint: whether the queries share a selection; probabilities are then summed over the queries, too.

    Returns:
        [Hk, Q, S], or [Hk, 1, S] for a joint selection.
    """
    totals = torch.maximum(totals, logits.logsumexp(-1))
    scores = (logits - totals[..., None]).logsumexp(1)
    return scores.logsumexp(1, keepdim=True) if joint else scores


def check_rerank(rerank: float) -> None:
    """Raise UsageError unless `rerank`, the number of candidates per token of the budget, is finite and at least 1."""
    if not 1 <= rerank < math.inf:
        raise UsageError(f"--rerank {rerank:g}: give at least 1, such as 2")


def check_channels(option: str, number: int, usual: int, head_dim: int) -> None:
    """Raise UsageError if an option asks for more numbers of each key than a head has channels.

    Args:
        usual: the option's default, which stands for all channels of a smaller head.
    """
    if number > max(head_dim, usual):
        raise UsageError(f"{option} {number}: the model's heads have {head_dim} channels; give at most {head_dim}")


def top_tokens(scores: torch.Tensor, tokens: int, index_rows: torch.Tensor | float) -> Selection:
    """Select the tokens with the highest scores.

    Args:
        scores: [Hk, Q, M].
        tokens: number of tokens to select, at most M.
        index_rows: D-sized rows of each head that were read to compute the scores.
    """
    starts = best_tokens(scores, tokens)
    return Selection(single_rows(starts), Cost(index_rows))


def first_dense(method: Method | None, layers: int) -> int:
    """Return the number of first layers that `--dense-layers` makes dense: `layers`, or 0 for dense attention (None)
    and for methods that have dense layers of their own."""
    return 0 if method is None or isinstance(method, LayerSharing) else layers
