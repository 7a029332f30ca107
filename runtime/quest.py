"""QUEST (arXiv 2406.10774): pages of neighbouring tokens, scored by an upper bound from per-channel extremes."""

from dataclasses import dataclass, field

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.kernels.lookup import attention_logits
from sparsekv.kernels.runs import fill_budget
from sparsekv.runtime.budget import Budget
from sparsekv.runtime.methods import Asked, Method, MiddleContext, Selection, Selector, register


@register("quest")
@dataclass(frozen=True)
class Quest(Method):
    """Reads each page's smallest and largest key per channel, then the pages whose bound is highest."""

    page_size: int = field(default=16, metadata={"help": "Tokens a page."})

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise UsageError(f"--page-size {self.page_size}: give at least 1")

    def prepare(self, context: MiddleContext) -> "QuestSelector":
        """Allocates two rows a page and head."""
        return QuestSelector(self, context)


class QuestSelector(Selector):
    """lowest, highest [Hk, P, D] of each page; the last page may be shorter."""

    def __init__(self, method: Quest, context: MiddleContext):
        keys, size = context.keys, method.page_size
        pages = -(-keys.shape[1] // size)
        padding = keys[:, -1:].expand(-1, pages * size - keys.shape[1], -1)
        paged = torch.cat([keys, padding], 1).unflatten(1, (pages, size))
        self.lowest, self.highest = paged.amin(2), paged.amax(2)
        self.starts = torch.arange(0, keys.shape[1], size, device=keys.device)
        self.lengths = (keys.shape[1] - self.starts).clamp(max=size)
        self.middle, self.facts = keys.shape[1], context.facts

    def bounds(self, query: torch.Tensor) -> torch.Tensor:
        """[Hk, G, Q, P] float32 for queries [Hk, G, Q, D]: no logit of a page's keys is higher than its bound."""
        scale, softcap = self.facts.softmax_scale, self.facts.softcap
        bounds = attention_logits(query.clamp(min=0), self.highest, scale)
        bounds = bounds + attention_logits(query.clamp(max=0), self.lowest, scale)
        return bounds if softcap is None else softcap * torch.tanh(bounds / softcap)

    def select(self, asked: Asked, budget: Budget) -> Selection:
        """A page's bound has each channel at the extreme of its sign; probabilities are averaged over the group."""
        scores = self.bounds(asked.query).softmax(-1).mean(1)
        scores = scores.mean(1, keepdim=True) if asked.shared else scores
        order = scores.argsort(dim=-1, descending=True, stable=True)
        tokens = budget.tokens(self.middle)
        return Selection(self.starts[order], fill_budget(self.lengths[order], tokens), tokens, 2.0 * len(self.starts))
