"""Centroids that represent all tokens a method does not choose: Multipole's replacement, for any selector."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch

from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.capabilities import Covers, GraphState, HoldsSelections, ObservesQuestion
from sparsekv.runtime.selection.interface import Selector
from sparsekv.runtime.selection.queries import Queries
from sparsekv.runtime.selection.selection import CentroidSegment, Rest, Selection


@dataclass(frozen=True)
class ResidualClusters:
    """Clusters with every middle token in exactly one: key and value centroids [Hk, C, D], token counts [Hk, C], and
    each token's cluster, labels [Hk, M]."""

    keys: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor
    labels: torch.Tensor

    def left(self, clusters: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """How many tokens of each cluster are left [Hk, Q or 1, C] float32 of those chosen, given the cluster of each
        [Hk, Q or 1, K], and which of them count, if not all do."""
        each = torch.ones_like(clusters, dtype=torch.float32) if chosen is None else chosen.float()
        counts = self.counts[:, None].expand(-1, clusters.shape[1], -1).float()
        return counts.scatter_add(-1, clusters, -each)


def residual_clusters(tensors: dict[str, torch.Tensor]) -> ResidualClusters:
    """The finest clusters in a method's tensors, whose token positions are counted from the first middle token."""
    order, counts = tensors["token_order"].long(), tensors["token_offsets"].diff(dim=1)
    numbers = torch.arange(counts.shape[1], device=order.device).expand_as(counts)
    cluster = numbers.flatten().repeat_interleave(counts.flatten(), output_size=order.numel()).view_as(order)
    return ResidualClusters(
        keys=tensors["level0.centroids"],
        values=tensors["level0.value_centroids"],
        counts=tensors["level0.counts"],
        labels=torch.zeros_like(order).scatter_(1, order, cluster),
    )


class ResidualSelector(Selector):
    """Another selector's choice, plus centroids: each cluster represents those of its tokens that were not chosen.

    It forwards graph state, question observation, what is to be forgotten, and coverage. It cannot append, because new
    tokens are in no cluster, and has no fused kernel.
    """

    def __init__(self, inner: Selector, clusters: ResidualClusters):
        self.inner, self.clusters, self.layout = inner, clusters, inner.layout
        labels = clusters.labels
        self.labels = labels if self.layout is None else labels.gather(1, self.layout)

    def graph_state(self) -> int | None:
        return self.inner.graph_state() if isinstance(self.inner, GraphState) else 0

    def observe(self, queries: Queries) -> None:
        if isinstance(self.inner, ObservesQuestion):
            self.inner.observe(queries)

    def forget_question(self) -> None:
        if isinstance(self.inner, ObservesQuestion):
            self.inner.forget_question()

    def forget_selections(self) -> None:
        if isinstance(self.inner, HoldsSelections):
            self.inner.forget_selections()

    def covered(self, queries: Queries) -> torch.Tensor | None:
        return self.inner.covered(queries) if isinstance(self.inner, Covers) else None

    def __copy__(self) -> "ResidualSelector":
        """One whose inner selector observes another question."""
        return ResidualSelector(copy(self.inner), self.clusters)

    def centroid_of(self, rest: Sequence[CentroidSegment]) -> torch.Tensor:
        return self.clusters.labels

    def rest_of(self, chosen: torch.Tensor) -> Rest:
        left = self.clusters.left(self.labels[:, None], chosen[:, None])
        centroids = CentroidSegment(self.clusters.keys, left.log(), self.clusters.values)
        return Rest(lambda: (centroids,), attended=True)

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Reads all key and value centroids, in addition to the inner selector's reads."""
        chosen = self.inner.select(queries, budget)
        rows, valid = chosen.rows.expand()
        cluster = self.labels[:, None].expand(-1, rows.shape[1], -1).gather(-1, rows)
        left = self.clusters.left(cluster, valid)
        centroids = CentroidSegment(self.clusters.keys, left.log(), self.clusters.values)
        cost = replace(chosen.cost, index_rows=chosen.cost.index_rows + 2.0 * self.clusters.keys.shape[1])
        return replace(chosen, cost=cost, rest=Rest(lambda: (centroids,), attended=True))
