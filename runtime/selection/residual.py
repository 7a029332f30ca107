"""Centroids in the place of everything that a method leaves out: Multipole's replacement, for any choice of tokens."""

from dataclasses import dataclass, replace

import torch

from sparsekv.kernels.common.runs import expand_runs
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import Asked, Replacement, Selection, Selector


@dataclass(frozen=True)
class ResidualClusters:
    """Clusters that hold every middle token once: key and value centroids [Hk, C, D], counts [Hk, C], and the cluster
    of each middle token, labels [Hk, M]."""

    keys: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor
    labels: torch.Tensor


def residual_clusters(tensors: dict[str, torch.Tensor]) -> ResidualClusters:
    """The finest level of a method's tensors, with token positions counted from the first middle token."""
    order, offsets = tensors["token_order"].long(), tensors["token_offsets"].long()
    slots = torch.arange(order.shape[1], device=order.device).expand_as(order).contiguous()
    cluster = torch.searchsorted(offsets, slots, right=True) - 1
    return ResidualClusters(
        keys=tensors["level0.centroids"],
        values=tensors["level0.value_centroids"],
        counts=tensors["level0.counts"],
        labels=torch.zeros_like(order).scatter_(1, order, cluster),
    )


class ResidualSelector(Selector):
    """Another selector's choice; each cluster stands for those of its tokens that were not chosen."""

    def __init__(self, inner: Selector, clusters: ResidualClusters):
        self.inner, self.clusters, self.token_order = inner, clusters, inner.token_order
        self.steps_alike = inner.steps_alike
        labels = clusters.labels
        self.labels = labels if self.token_order is None else labels.gather(1, self.token_order)

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.inner.version

    def observe(self, asked: Asked) -> None:
        self.inner.observe(asked)

    def forget(self) -> None:
        """Nothing was taken in: a cluster cannot stand for a token that is not in it."""
        self.inner.forget()

    def in_reach(self, asked: Asked) -> torch.Tensor | None:
        return self.inner.in_reach(asked)

    def select(self, asked: Asked, budget: Budget) -> Selection:
        """Reads all key and value centroids beside what the inner choice read."""
        chosen = self.inner.select(asked, budget)
        rows, valid = expand_runs(chosen.starts, chosen.lengths, chosen.capacity)
        cluster = self.labels[:, None].expand(-1, rows.shape[1], -1).gather(-1, rows)
        counts = self.clusters.counts[:, None].expand(-1, rows.shape[1], -1).float()
        left = counts.scatter_add(-1, cluster, -valid.float())
        replacement = Replacement(self.clusters.keys, left.log(), self.clusters.values)
        read = chosen.index_rows + 2.0 * self.clusters.keys.shape[1]
        return replace(chosen, replacements=(replacement,), stand_ins=None, dropped=None, index_rows=read)
