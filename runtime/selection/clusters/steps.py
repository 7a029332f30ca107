"""Selecting clusters for one decode step's query, by kernels whose logits and row indices the attention reuses."""

from dataclasses import dataclass

import torch

from sparsekv.formats.schema import LayerFacts
from sparsekv.kernels.attention.types import ScoredCentroids
from sparsekv.kernels.clusters.best_clusters import CountedClusters, best_clusters
from sparsekv.kernels.clusters.cluster_choice import choose_clusters, choose_listed, keep_clusters, open_clusters
from sparsekv.kernels.clusters.shared_choice import choose_together
from sparsekv.kernels.clusters.tree import Tree
from sparsekv.kernels.clusters.types import Children, ClusterChoice
from sparsekv.kernels.common.eight_bits import RowsOf8Bits
from sparsekv.runtime.selection.selection import CentroidSegment, Cost, Rest, RowIndices, RowSet, Selection


@dataclass(frozen=True)
class ClusterSteps:
    """One layer's clusters: those that are scored, and the centroids that represent tokens which are not chosen.

    keys, values: each level's centroids [Hk, C, D] as they are attended. Without replacement values may be empty;
    keys are then passed in their place, unread. starts [Hk, C] int64 (first_row: the same in int32, for kernels): the
    first row of each finest cluster. `own`: whether the scored centroids of `tree` are the same as `keys`. `below`
    [Hk, C] int32 each, for the level above the finest: each cluster's number of children and its first child.
    `in_8_bits`: the finest level's keys and values as kernels of a flat lookup read them, if not as they are.
    """

    tree: Tree
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    starts: torch.Tensor
    first_row: torch.Tensor
    counted: CountedClusters
    below: tuple[torch.Tensor, torch.Tensor] | None
    facts: LayerFacts
    own: bool
    in_8_bits: RowsOf8Bits | None = None

    def flat(
        self,
        query: torch.Tensor,
        tokens: int,
        *,
        rows: int,
        replace: bool,
        threshold: float | None = None,
        counter: torch.Tensor | None = None,
    ) -> Selection:
        """The best of all finest clusters, on a GPU.

        Args:
            query: [Hk, G, 1, D].
            rows: D-sized rows that are read per scored cluster.
            replace: attend to centroids for the tokens that are not chosen.
            threshold: choose every cluster whose score reaches it, up to `tokens` tokens.
            counter: [Hk] int64, to which the number of tokens chosen by threshold is added.
        """
        counts, numbers = self.tree.counts[0], self.in_8_bits
        centroids = self.tree.centroids[0] if numbers is None else numbers
        looked = query[:, :, 0], centroids, counts, self.first_row
        how = self.facts.softmax_scale, self.facts.softcap
        if threshold is None:
            chosen = choose_clusters(*looked, tokens, *how)
        else:
            chosen = keep_clusters(*looked, threshold, tokens, *how, counter)
        values = (self.values or self.keys)[0]
        # Logits of lookup centroids (windowed RoPE) differ from the attention's, so they are not passed on.
        scored = None
        if numbers is not None:
            scored = ScoredCentroids(chosen.logits, chosen.log_left, numbers.values, scales=numbers.scales)
        elif self.own:
            scored = ScoredCentroids(chosen.logits, chosen.log_left, values)
        left = CentroidSegment(self.keys[0], chosen.log_left[:, None, : counts.shape[1]], values, scored)
        return Selection(
            self._rows(chosen, self.starts, tokens, tokens if threshold is None else 0),
            Cost(float(counts.shape[1] * rows), per_count=0 if threshold is None else 2),
            Rest(lambda: (left,), attended=replace),
        )

    def together(
        self,
        query: torch.Tensor,
        ends: torch.Tensor,
        tokens: int,
        capacity: int,
        thresholds: torch.Tensor | None,
        *,
        rows: int,
        replace: bool,
        counter: torch.Tensor | None,
    ) -> Selection:
        """What several questions choose of all finest clusters, each for itself, on a GPU.

        Args:
            query: [Hk, G, T, D], one question after another; ends [B] int32: after which token each ends.
            tokens: budget of each; capacity: tokens that they take together.
            thresholds: [B], of each question, if clusters are chosen by these; counter [Hk] int64: to which the number
                of tokens chosen is added.
            rows, replace: as for `flat`.
        """
        centroids, counts = self.tree.centroids[0], self.tree.counts[0]
        facts, values = self.facts, (self.values or self.keys)[0]
        chosen = choose_together(
            query, ends, centroids, counts, self.first_row, tokens, capacity, facts.softmax_scale, facts.softcap,
            thresholds, counter,
        )  # fmt: skip
        left = CentroidSegment(self.keys[0], chosen.log_left[:, None, : counts.shape[1]], values)
        indices = RowIndices(chosen.rows, chosen.used, None)
        return Selection(
            RowSet(self.starts[:, None], chosen.lengths[:, None], capacity, 0, indices),
            Cost(float(counts.shape[1] * rows), per_count=2),
            Rest(lambda: (left,), attended=replace),
        )

    def down(
        self,
        query: torch.Tensor,
        wanted: int,
        slots: int,
        tokens: int,
        *,
        rows: int,
        replace: bool,
        counter: torch.Tensor | None,
    ) -> Selection:
        """Down two levels, on a GPU: opens the best coarse clusters, and chooses the best of their children.

        Args:
            wanted: coarse clusters are opened until they have this many children and hold `tokens` tokens.
            slots: upper bound of the number of opened children.
            counter: [Hk] int64, to which the number of opened children is added. With it the centroids of the rest
                come with logits, for kernels that attend in place.
        """
        assert self.below is not None
        (fine, coarse), (counts, coarse_counts) = self.tree.centroids, self.tree.counts
        (children, first_child), q = self.below, query[:, :, 0]
        how = self.facts.softmax_scale, self.facts.softcap
        of_coarse, in_place = Children(children, first_child, slots, counter), counter is not None
        opened = open_clusters(q, coarse, coarse_counts, of_coarse, wanted, tokens, *how)
        below = opened.rows, opened.used
        listed = choose_listed(q, fine, counts, self.first_row, below, tokens, *how)
        chosen, (fine_values, coarse_values) = listed.chosen, self.values or self.keys
        scored = (
            ScoredCentroids(opened.logits, opened.log_left, coarse_values),
            ScoredCentroids(chosen.logits, chosen.log_left, fine_values, *below),
        )

        def left() -> tuple[CentroidSegment, ...]:
            there = torch.arange(slots, device=q.device) < opened.used[:, None]
            clusters = torch.where(there, opened.rows[:, :slots], 0).long()
            some = clusters[..., None].expand(-1, -1, fine.shape[2])
            coarse_left, fine_left = opened.log_left[:, None, : coarse.shape[1]], chosen.log_left[:, None, :slots]
            return (
                CentroidSegment(coarse, coarse_left, coarse_values),
                CentroidSegment(fine.gather(1, some), fine_left, fine_values.gather(1, some), clusters=clusters),
            )

        return Selection(
            self._rows(chosen, listed.starts, tokens, tokens),
            Cost((coarse.shape[1] + (0.0 if in_place else opened.used[:, None])) * rows, rows if in_place else 0),
            Rest(left, attended=replace, in_place=scored if replace and in_place else None),
        )

    def _rows(self, chosen: ClusterChoice, starts: torch.Tensor, tokens: int, total: int) -> RowSet:
        indices = RowIndices(chosen.rows, chosen.used, chosen.queue)
        return RowSet(starts[:, None], chosen.lengths[:, None], tokens, total, indices)

    def best(self, query: torch.Tensor, tokens: int, *, rows: int, replace: bool) -> Selection:
        """The best of all finest clusters, on a CPU; the runs are the chosen clusters and a few empty ones."""
        keys = self.keys[0]
        best = best_clusters(query.squeeze(2), self.counted, tokens, self.facts.softmax_scale, self.facts.softcap)

        def left() -> tuple[CentroidSegment, ...]:
            share, values = best.log_share_left(self.counted.shares), (self.values or self.keys)[0]
            # These logits include the log count of whole clusters, so they go with the share of tokens left.
            scored = ScoredCentroids(best.logits, share.squeeze(1), values) if self.own else None
            return (CentroidSegment(keys, self.counted.log_counts + share, values, scored),)

        starts = self.starts.gather(1, best.clusters).unsqueeze(1)
        return Selection(
            RowSet(starts, best.lengths.unsqueeze(1), tokens, tokens),
            Cost(float(keys.shape[1] * rows)),
            Rest(left, attended=replace),
        )
