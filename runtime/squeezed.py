"""Squeezed Attention, online (arXiv 2411.09688): centroid lookup, section 3.2, and hierarchical, section 3.3.

Clusters are chosen by S_i, the estimated attention probability of one of their tokens, averaged over the group. With
`selection=budget` the best ones up to the budget, the last of them in part; with `threshold` all above one number for
the whole model, calibrated so that the mean share kept is the budget: heads with flat attention keep more.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch

from sparsekv.formats.errors import UsageError
from sparsekv.kernels.lookup import cluster_scores
from sparsekv.kernels.runs import fill_budget
from sparsekv.kernels.tree import Tree, child_scores, tree_from_tensors
from sparsekv.runtime.budget import Budget
from sparsekv.runtime.clusters import Clustering, describe_clusters
from sparsekv.runtime.methods import ExactLogsumexp, Method, MiddleContext, Selection, Selector, register

LOOKUPS = ("flat", "hierarchical")
SELECTIONS = ("budget", "threshold")


@register("squeezed")
@dataclass(frozen=True)
class Squeezed(Method):
    """Chooses clusters of keys by their centroids."""

    needs_index: ClassVar[bool] = True
    lookup: str = field(default="flat", metadata={"help": f"How clusters are looked up: {', '.join(LOOKUPS)}."})
    selection: str = field(default="budget", metadata={"help": f"How they are chosen: {', '.join(SELECTIONS)}."})

    def __post_init__(self) -> None:
        if self.lookup not in LOOKUPS:
            raise UsageError(f"--lookup {self.lookup}: choose one of {', '.join(LOOKUPS)}")
        if self.selection not in SELECTIONS:
            raise UsageError(f"--selection {self.selection}: choose one of {', '.join(SELECTIONS)}")

    def prepare(self, context: MiddleContext) -> "SqueezedSelector":
        """Keeps the levels' centroids and counts; allocates nothing of the context's size but the token order."""
        if self.lookup not in context.calibration["decode"]:
            raise UsageError("this index has one level; build it with --levels 0.05,0.01 for --lookup hierarchical")
        return SqueezedSelector(self, context)

    @classmethod
    def variants(cls, calibration: dict[str, Any]) -> dict[str, Self]:
        names = {(lookup, selection): cls(lookup, selection) for selection in SELECTIONS for lookup in LOOKUPS}
        return {
            lookup if selection == "budget" else f"{lookup} threshold": method
            for (lookup, selection), method in names.items()
            if lookup in calibration["decode"]
        }

    @classmethod
    def describe(cls, tensors: dict[str, torch.Tensor], biggest: int) -> Clustering:
        return describe_clusters(tensors, biggest)


class SqueezedSelector(Selector):
    """One layer's levels of centroids."""

    def __init__(self, method: Squeezed, context: MiddleContext):
        self.method, self.facts, self.calibration = method, context.facts, context.calibration
        self.tree: Tree = tree_from_tensors(context.tensors)
        self.token_order = context.tensors["token_order"].long()
        self.starts = context.tensors["token_offsets"][:, :-1].long()
        self.middle = self.token_order.shape[1]
        self.children = [
            torch.zeros_like(self.tree.children[level]).scatter_add_(
                1, context.tensors[f"level{level}.parent"].long(), (self.tree.counts[level] > 0).long()
            )
            for level in range(len(self.tree.children))
        ]
        self.fewest_tokens = [_fewest_tokens(counts) for counts in self.tree.counts]

    def select(
        self, query: torch.Tensor, budget: Budget, exact_logsumexp: ExactLogsumexp, *, shared: bool
    ) -> Selection:
        """Runs are whole clusters of the artifact's token order; by threshold, one sync a level sizes the gather."""
        calibrated = self.calibration["prefill" if shared else "decode"]
        # Of what the coarse levels leave, half at most: a larger budget gains nothing from going through them.
        if self.method.lookup == "flat" or budget.share(self.middle) > 0.5 ** len(self.tree.centroids):
            return self._select_flat(query, budget, calibrated["flat"], shared)
        return self._select_hierarchical(query, budget, calibrated["hierarchical"], shared)

    def _select_flat(self, query: torch.Tensor, budget: Budget, calibrated: dict[str, Any], shared: bool) -> Selection:
        centroids, counts = self.tree.centroids[0], self.tree.counts[0][:, None]
        scores = cluster_scores(query, centroids, counts[:, 0], self.facts.softmax_scale, self.facts.softcap)
        scores = scores.mean(1, keepdim=True) if shared else scores
        rows = self.starts[:, None].expand_as(scores)
        return self._choose(scores, rows, counts.expand_as(scores), budget, calibrated, float(centroids.shape[1]))

    def _select_hierarchical(
        self, query: torch.Tensor, budget: Budget, calibrated: dict[str, Any], shared: bool
    ) -> Selection:
        """From the coarsest level down, the children of what was opened are scored against each other alone."""
        top = len(self.tree.centroids) - 1
        counts = self.tree.counts[top][:, None]
        scale, softcap = self.facts.softmax_scale, self.facts.softcap
        scores = cluster_scores(query, self.tree.centroids[top], counts[:, 0], scale, softcap)
        scores = scores.mean(1, keepdim=True) if shared else scores
        counts = counts.expand_as(scores)
        clusters = torch.arange(scores.shape[2], device=scores.device).expand_as(scores)
        read: torch.Tensor | float = float(scores.shape[2])
        for depth, level in enumerate(range(top - 1, -1, -1), 1):
            starts, lengths, capacity = self._open(level, scores, counts, clusters, budget, calibrated, depth)
            scores, clusters, counts = child_scores(query, self.tree, level, starts, lengths, capacity, scale, softcap)
            read = read + lengths.sum(-1)
            scores = scores.mean(1, keepdim=True) if shared else scores
        return self._choose(scores, self._gather(self.starts, clusters), counts, budget, calibrated, read)

    def _open(
        self,
        level: int,
        scores: torch.Tensor,
        counts: torch.Tensor,
        clusters: torch.Tensor,
        budget: Budget,
        calibrated: dict[str, Any],
        depth: int,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Runs of clusters of `level` whose parents survive: above the coarse threshold, or the best half of them.

        Where clusters are so uneven that half of them could hold less than the budget, it is more than half.
        """
        order = scores.argsort(dim=-1, descending=True, stable=True)
        parents = clusters.gather(-1, order)
        starts = self._gather(self.tree.first_child[level], parents)
        # Empty clusters are the last children of the last parent: leaving them out keeps runs runs.
        children = self._gather(self.children[level], parents) * (counts.gather(-1, order) > 0)
        if self.method.selection == "threshold":
            alive = (scores >= calibrated["coarse_thresholds"][depth - 1]) & (counts > 0)
            # The best one is always opened: a head below the threshold everywhere still needs a denominator.
            alive = alive.gather(-1, order) | (torch.arange(order.shape[-1], device=order.device) == 0)
            lengths = children * alive
            return starts, lengths, int(lengths.sum(-1).max())
        half = round(self.tree.centroids[level].shape[1] * 0.5**depth)
        enough = int(torch.searchsorted(self.fewest_tokens[level], budget.tokens(self.middle))) + 1
        capacity = max(half, enough)
        return starts, fill_budget(children, capacity), capacity

    def _choose(
        self,
        scores: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
        budget: Budget,
        calibrated: dict[str, Any],
        index_rows: torch.Tensor | float,
    ) -> Selection:
        if self.method.selection == "threshold":
            lengths = counts.long() * (scores >= _threshold(calibrated["curve"], budget.share(self.middle)))
            return Selection(starts, lengths, int(lengths.sum(-1).max()), index_rows)
        order = scores.argsort(dim=-1, descending=True, stable=True)
        tokens = budget.tokens(self.middle)
        lengths = fill_budget(counts.gather(-1, order).long(), tokens)
        return Selection(starts.gather(-1, order), lengths, tokens, index_rows)

    def _gather(self, values: torch.Tensor, clusters: torch.Tensor) -> torch.Tensor:
        return values[:, None].expand(-1, clusters.shape[1], -1).gather(-1, clusters)


def _fewest_tokens(counts: torch.Tensor) -> torch.Tensor:
    """[C] on the CPU: entry n is the fewest tokens that n + 1 filled clusters of any head, or all of them, hold."""
    total = counts.sum(-1, keepdim=True)
    smallest_first = torch.where(counts > 0, counts, total).sort(-1).values.long()
    return smallest_first.cumsum(-1).clamp(max=int(total[0])).amin(0).cpu()


def _threshold(curve: list[list[float]], share: float) -> float:
    """Threshold for any target share, between the calibrated points on logarithmic axes; 0 keeps everything."""
    if share >= 1:
        return 0.0
    kept, thresholds = np.array(curve).T
    known = thresholds > 0
    return float(np.exp(np.interp(np.log(share), np.log(kept[known]), np.log(thresholds[known]))))
