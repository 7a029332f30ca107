"""Attention in which centroids represent tokens, by its definition, and a decode step to compare with it.

A centroid's term N exp(q Kc) Vc equals the terms of N tokens whose keys are all Kc and whose values are all Vc. So the
reference is dense attention in which a represented token has the mean key and the mean value of its cluster.
"""

import torch

from sparsekv.formats.index.schema import LayerFacts
from sparsekv.kernels.attention.attention import causal_mask
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.attention.guard import Guard, MissedMeter
from sparsekv.runtime.selection.interface import Budget, Selection, Selector

from .clusters import member_means, token_labels
from .random_tensors import normal
from .reference import reference_attention
from .small_layer import SmallLayer, all_chosen, as_queries, sparse_layer

EXACT = -1
Rows = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [Hk, T, D]."""


def represented(selection: Selection, selector: Selector, level: torch.Tensor | int, middle: int) -> torch.Tensor:
    """Return [Hk, R, M]: EXACT for chosen tokens, and for others the level of the cluster that represents them.

    `level` is one number, or [Hk, R, M].
    """
    chosen = torch.zeros(*selection.rows.starts.shape[:2], middle, dtype=torch.bool)
    for head, of_head in enumerate(all_chosen(selection, selector)):
        for row, tokens in enumerate(of_head):
            chosen[head, row, tokens] = True
    return torch.where(chosen, EXACT, torch.as_tensor(level))


def tokens_represented(selection: Selection) -> torch.Tensor:
    """Return the number [Hk, R] of tokens that are chosen or represented by a centroid."""
    stood_for = [part.log_counts.exp().sum(-1) for part in selection.attended_segments()]
    return selection.rows.lengths.sum(-1) + torch.stack(stood_for).sum(0)


def replaced_attention(
    query: torch.Tensor,
    middle: Rows,
    exact: Rows,
    level: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    facts: LayerFacts,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention [Hk, G, Q, D] float64 of queries [Hk, G, Q, D], whose tokens are the last of the exact rows.

    A middle token that is not chosen has the mean key and the mean value of its cluster.

    Args:
        level: [Hk, Q or 1, M], as `represented` returns it.
        tensors: the clusters' tensors, with token positions counted from the first middle token.
        sink_logits: [Hk, G].
    """
    Hk, _, Q, _ = query.shape
    rows = []
    for inside, outside in zip(middle, exact, strict=True):
        centroids = _substituted(inside, tensors, level).expand(-1, Q, -1, -1)
        whole = torch.cat([centroids, outside.double()[:, None].expand(-1, Q, -1, -1)], 2)
        rows.append(whole.flatten(0, 1))
    mask = causal_mask(Q, rows[0].shape[1], None, query.device).repeat(Hk, 1)[:, None, None]
    sinks = None if sink_logits is None else sink_logits.repeat_interleave(Q, 0)
    each = query.transpose(1, 2).flatten(0, 1)[:, :, None]
    output = reference_attention(each, *rows, facts.softmax_scale, mask=mask, softcap=facts.softcap, sink_logits=sinks)
    return output[:, :, 0].unflatten(0, (Hk, Q)).transpose(1, 2)


def _substituted(rows: torch.Tensor, tensors: dict[str, torch.Tensor], level: torch.Tensor) -> torch.Tensor:
    """Return [Hk, R, M, D] float64: each row of [Hk, M, D], or the mean of its cluster at the level in [Hk, R, M]."""
    result = rows.double()[:, None].expand(-1, level.shape[1], -1, -1)
    for number in range(int(level.max()) + 1):
        means = member_means(rows, token_labels(tensors, number))
        result = torch.where((level == number)[..., None], means[:, None], result)
    return result


class Step:
    """One step of a sparse layer over random new tokens, whose queries attend.

    `query` and `output` are [Hk, G, Q, D]. `exact` has the rows of sinks, tail and new tokens. `selection` is the
    selector's choice.
    """

    def __init__(
        self,
        layer: SmallLayer,
        selector: Selector,
        budget: Budget,
        *,
        queries: int = 1,
        seed: int = 0,
        sink_logits: torch.Tensor | None = None,
        gauge: bool = False,
        guard: Guard | None = None,
    ):
        self.layer, self.selector, self.sink_logits, facts = layer, selector, sink_logits, layer.context.facts
        Hk, G, _, D = layer.queries.shape
        new = normal(seed, Hk, queries, D), normal(seed + 1, Hk, queries, D)
        self.query = normal(seed + 2, Hk, G, queries, D)
        self.sparse = sparse_layer(layer, selector, budget, gauge=gauge, guard=guard)
        self.sparse.update(new[0][None], new[1][None])
        flat, sinks = self.query.flatten(0, 1), None if sink_logits is None else sink_logits.flatten()
        call = AttentionCall(0, flat, *new, facts.softmax_scale, facts.softcap, None, sinks)
        self.output = self.sparse.attend(call).view_as(self.query)
        outside = [
            torch.cat([rows[:, : layer.middle.start], rows[:, layer.middle.stop :]], 1)
            for rows in (layer.keys, layer.values)
        ]
        self.exact = torch.cat([outside[0], new[0]], 1), torch.cat([outside[1], new[1]], 1)
        self.selection = selector.select(
            as_queries(self.query, self._exact_logsumexp(), joint=queries > 1, first=layer.split.tokens), budget
        )

    @property
    def meter(self) -> MissedMeter:
        """The layer's meter, which exists with a gauge or a guard."""
        assert self.sparse.plan.meter is not None
        return self.sparse.plan.meter

    def _exact_logsumexp(self) -> torch.Tensor:
        facts = self.layer.context.facts
        logits = facts.softmax_scale * torch.einsum("hgqd,htd->hgqt", self.query, self.exact[0])
        if facts.softcap is not None:
            logits = facts.softcap * torch.tanh(logits / facts.softcap)
        hidden = ~causal_mask(self.query.shape[2], logits.shape[3], None, logits.device)
        total = logits.masked_fill(hidden, -torch.inf).logsumexp(-1)
        return total if self.sink_logits is None else torch.logaddexp(total, self.sink_logits[..., None])

    def expected(self, level: torch.Tensor | int = 0, tensors: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Compute the output by definition: clusters of a level, or of a level for each token, represent tokens not
        chosen."""
        layer = self.layer
        stands = represented(self.selection, self.selector, level, layer.split.middle)
        middle = layer.keys[:, layer.middle], layer.values[:, layer.middle]
        tensors = layer.context.tensors if tensors is None else tensors
        return replaced_attention(
            self.query, middle, self.exact, stands, tensors, layer.context.facts, self.sink_logits
        )

    def dense(self) -> torch.Tensor:
        """Compute dense attention to all rows."""
        everything = torch.full((len(self.query), 1, self.layer.split.middle), EXACT)
        middle = self.layer.keys[:, self.layer.middle], self.layer.values[:, self.layer.middle]
        return replaced_attention(
            self.query, middle, self.exact, everything, {}, self.layer.context.facts, self.sink_logits
        )
