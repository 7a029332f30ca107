"""SparQ Attention (arXiv 2312.04985): logits of all keys are estimated from the channels where the query is largest.

As in the paper, the r channels with the largest sum of |q| over the group are read, so that all heads of a group read
the same channels. Estimates are multiplied by the softmax scale and divided by the temperature sqrt(|q in these
channels|_1 / |q|_1).

The paper adds the mean of all values with the weight 1 - alpha, the estimated attention to the tokens not selected.
Here, with `mean_value`, the mean key and value are one more row of the softmax, whose weight can differ between the
query heads of a KV head. The row has one log-weight for all these heads: the mean of the log-weights with which each
head would give the row the weight 1 - alpha. With one query head per KV head, the result is that of the paper, except
that alpha includes the rows that are always attended to (sinks, tail, new tokens).
"""

from dataclasses import dataclass, field, replace
from typing import Self

import torch

from sparsekv.formats.errors import check_at_least_one
from sparsekv.formats.index.schema import MethodRecord
from sparsekv.kernels.scores.logits import attention_logits, softcapped
from sparsekv.runtime.selection.interface import (
    Budget,
    CentroidSegment,
    Cost,
    Method,
    MiddleContext,
    Queries,
    Residual,
    Selection,
    Selector,
    SelectorReport,
    methods,
)
from sparsekv.runtime.selection.token_choice import check_channels, group_probability, token_logits, top_tokens


@methods.register("sparq")
@dataclass(frozen=True)
class SparQ(Method):
    """Ranks all keys by a few of their channels."""

    channels: int = field(
        default=16,
        metadata={"help": "Number of channels of a head's keys by which tokens are ranked; at most all of them."},
    )
    mean_value: bool = field(
        default=False,
        metadata={"help": "Attend to the mean key and value instead of the tokens that are not selected."},
    )

    def __post_init__(self) -> None:
        check_at_least_one(self, "channels")

    def replaces(self) -> bool:
        return self.mean_value

    @classmethod
    def variants(cls, record: MethodRecord | None) -> dict[str, Self]:
        """Return the variant without the mean value, and the variant with it."""
        return {"": cls(), "mean value": cls(mean_value=True)}

    def prepare(self, context: MiddleContext) -> "SparQSelector":
        """Create the selector of a layer.

        Allocates a second copy of the keys, channel-major as in the paper, so that single channels can be read.

        Raises:
            UsageError: heads have fewer channels than `channels`.
        """
        check_channels("--channels", self.channels, SparQ.channels, context.keys.shape[2])
        return SparQSelector(context, self)


class SparQSelector(Selector):
    """Selects by logits that are estimated from a few channels of the keys [Hk, M, D].

    `by_channel` [Hk, D, M] are the keys in channel-major order. `mean_rows` are the mean key and value [Hk, 1, D]; None
    without `mean_value`.
    """

    def __init__(self, context: MiddleContext, method: SparQ):
        self.keys, self.facts = context.keys, context.facts
        self.by_channel = context.keys.transpose(1, 2).contiguous()
        self.channels = min(method.channels, self.by_channel.shape[1])
        self.mean_rows: tuple[torch.Tensor, torch.Tensor] | None = None
        if method.mean_value:
            values = context.load_values()
            self.mean_rows = _mean(self.keys), _mean(values)

    def estimates(self, query: torch.Tensor, *, shared: bool) -> torch.Tensor:
        """Estimate the logits [Hk, G, Q, M] float32 of queries [Hk, G, Q, D]; `shared`: all Q use the same channels."""
        size = query.float().abs()
        sums = size.sum((1, 2) if shared else 1).view(len(query), -1, query.shape[3])
        best = sums.topk(self.channels, -1).indices
        parts = query.split(query.shape[2] if shared else 1, 2)
        return torch.cat([self._estimate(part, best[:, n]) for n, part in enumerate(parts)], 2)

    def _estimate(self, query: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """Estimate logits from the channels `best` [Hk, r]."""
        keys = self.by_channel.gather(1, best[..., None].expand(-1, -1, self.by_channel.shape[2]))
        some = query.gather(-1, best[:, None, None].expand(*query.shape[:3], -1)).float()
        share = some.abs().sum(-1, keepdim=True) / query.float().abs().sum(-1, keepdim=True).clamp(min=1e-30)
        logits = attention_logits(some / share.clamp(min=1e-30).sqrt(), keys.transpose(1, 2), self.facts.softmax_scale)
        return softcapped(logits, self.facts.softcap)

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select the tokens of highest estimated probability."""
        logits = self.estimates(queries.query, shared=queries.joint)
        read = self.keys.shape[1] * self.channels / self.keys.shape[2]
        chosen = top_tokens(group_probability(logits, queries), budget.tokens(self.keys.shape[1]), read)
        if self.mean_rows is None:
            return replace(chosen, cost=Cost(read, unshared=read))
        mean = self._mean_of_rest(logits, queries, chosen.rows.starts)
        return replace(chosen, cost=Cost(read + 2), rest=Residual(lambda: (mean,), attended=True))

    @property
    def report(self) -> SelectorReport | None:
        """Report functions, in which the mean is centroid 0 and represents all tokens; None without the mean value."""
        if self.mean_rows is None:
            return None
        numbers = torch.zeros(self.keys.shape[:2], dtype=torch.int64, device=self.keys.device)
        return SelectorReport(centroid_of=lambda rest: numbers)

    def _mean_of_rest(self, logits: torch.Tensor, queries: Queries, tokens: torch.Tensor) -> CentroidSegment:
        """Weight the mean key and value to represent all tokens except the selected `tokens` [Hk, Q or 1, K]."""
        assert self.mean_rows is not None
        beside, places = queries.exact_logsumexp(), tokens[:, None].expand(*logits.shape[:3], -1)
        left = logits.scatter(-1, places, -torch.inf).logsumexp(-1)
        kept = torch.logaddexp(logits.gather(-1, places).logsumexp(-1), beside)
        exact = token_logits(queries.query, self.keys, tokens, self.facts)
        wanted = left - kept + torch.logaddexp(exact.logsumexp(-1), beside)
        mean_key, mean_value = self.mean_rows
        of_mean = attention_logits(queries.query, mean_key, *self.facts.scaling)[..., 0]
        return CentroidSegment(mean_key, (wanted - of_mean).mean(1)[..., None], mean_value)


def _mean(rows: torch.Tensor) -> torch.Tensor:
    """Compute the mean [Hk, 1, D] of rows [Hk, M, D], in their dtype."""
    return rows.float().mean(1, keepdim=True).to(rows.dtype)
