"""Selection of clusters for one decode step, centroids of the clusters not selected, and calibrated thresholds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import Any, Self

import numpy as np
import torch

from sparsekv.formats.index.schema import LayerFacts
from sparsekv.kernels.clusters.cluster_choice import (
    Children,
    ClusterChoice,
    CountedClusters,
    Tree,
    best_clusters,
    choose_clusters,
    choose_listed,
    choose_together,
    open_clusters,
)
from sparsekv.kernels.common.kernel_inputs import Int8Kernel, ScoredCentroids
from sparsekv.kernels.common.row_operations import rotate
from sparsekv.runtime.selection.interface import (
    CentroidSegment,
    Cost,
    MiddleContext,
    Queries,
    Residual,
    RowIndices,
    RowSet,
    Selection,
)


@dataclass(frozen=True)
class Scored:
    """S scored clusters of one level: their indices `clusters`, scores and token counts [Hk, Q or 1, S].

    Unused slots have index 0 and count 0. `read` is the number of clusters of each head whose centroids were read.
    """

    level: int
    clusters: torch.Tensor
    scores: torch.Tensor
    counts: torch.Tensor
    read: torch.Tensor | float


@dataclass(frozen=True)
class LevelCentroids:
    """Centroids of each level, to which queries attend.

    Attributes:
        keys, values: centroids [Hk, C, D] of each level. `values` is empty if the index has no value centroids.
        counts: token counts [Hk, C] of each level's clusters.
        parents: parent [Hk, C] of each cluster, for all levels except the coarsest.
        layout: [Hk, M], the middle position of each stored row.
        starts: [Hk, C], first row of each finest cluster.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    counts: tuple[torch.Tensor, ...]
    parents: tuple[torch.Tensor, ...]
    layout: torch.Tensor
    starts: torch.Tensor

    @cached_property
    def labels(self) -> torch.Tensor:
        """Finest cluster of each token [Hk, M] int64, in order of position."""
        rows = torch.arange(self.layout.shape[1], device=self.layout.device).expand_as(self.layout).contiguous()
        cluster = torch.searchsorted(self.starts, rows, right=True) - 1
        return torch.zeros_like(cluster).scatter_(1, self.layout, cluster)

    def remainders(self, scored: list[Scored], taken: torch.Tensor) -> tuple[CentroidSegment, ...]:
        """Return the centroids of unselected tokens, one segment for each scored level.

        Each unselected token is represented by the centroid of its finest scored cluster.

        Args:
            scored: the scored clusters of each level, coarsest first.
            taken: [Hk, Q or 1, S], number of tokens selected from each cluster of the last entry of `scored`.
        """
        parts = []
        for above, below in pairwise(scored):
            handed = above.scores.new_zeros(*above.scores.shape[:2], self.counts[above.level].shape[1])
            handed.scatter_add_(-1, of_clusters(self.parents[below.level], below.clusters), below.counts.to(handed))
            # An unused slot has count 0 and cluster index 0. The tokens of cluster 0's scored children are subtracted
            # from this 0; clamp the result.
            left = (above.counts - handed.gather(-1, above.clusters)).clamp(min=0)
            parts.append(self._remainder(above, left))
        return (*parts, self._remainder(scored[-1], scored[-1].counts - taken))

    def of_tokens(self, rest: Sequence[CentroidSegment]) -> torch.Tensor:
        """Return the index of the centroid that represents each token: [Hk, M] int64, in order of position.

        Indices count through the segments `rest`. The indices of selected tokens are arbitrary.

        Args:
            rest: the segments that `remainders` returned, coarsest level first.
        """
        if len(rest) == 1:
            return self.labels
        numbers, before = _own_numbers(rest[0], self.counts[len(rest) - 1]), rest[0].keys.shape[1]
        for level, part in zip(range(len(rest) - 2, -1, -1), rest[1:], strict=True):
            own = _own_numbers(part, self.counts[level])
            numbers = torch.where(own < 0, numbers.gather(1, self.parents[level].long()), own + before)
            before += part.keys.shape[1]
        return numbers.clamp(min=0).gather(1, self.labels)

    def _remainder(self, scored: Scored, left: torch.Tensor) -> CentroidSegment:
        """Return the centroids of scored clusters, each of which represents `left` [Hk, Q or 1, S] tokens.

        If all queries have the same scored clusters, only their centroids are returned. Otherwise all centroids of the
        level are returned, and those of clusters that a query did not score represent no token.
        """
        keys = self.keys[scored.level]
        values = self.values[scored.level] if self.values else keys
        if scored.clusters.shape[2] == keys.shape[1]:
            everything = torch.zeros_like(left).scatter_add_(-1, scored.clusters, left)
            return CentroidSegment(keys, everything.float().log(), values)
        if scored.clusters.shape[1] == 1:
            clusters = scored.clusters[:, 0]
            rows = clusters[..., None].expand(-1, -1, keys.shape[2])
            picked = keys.gather(1, rows), left.float().log(), values.gather(1, rows)
            return CentroidSegment(*picked, clusters=clusters)
        spread = left.new_zeros(*left.shape[:2], keys.shape[1]).scatter_add_(-1, scored.clusters, left)
        return CentroidSegment(keys, spread.float().log(), values)


def _own_numbers(part: CentroidSegment, counts: torch.Tensor) -> torch.Tensor:
    """Return each cluster's index among the centroids of its level's segment, [Hk, C]; -1 if it represents no token."""
    places = torch.arange(part.keys.shape[1], device=counts.device).expand(len(counts), -1)
    used = places.where(part.log_counts[:, 0] > -torch.inf, -1)
    if part.clusters is None:
        return used
    # An unused slot has cluster index 0. Its value -1 does not change that cluster's maximum.
    nowhere = torch.full_like(counts, -1, dtype=torch.int64)
    return nowhere.scatter_reduce_(1, part.clusters.long(), used, "amax")


def of_clusters(values: torch.Tensor, clusters: torch.Tensor) -> torch.Tensor:
    """Gather the values [Hk, C] of the clusters with indices [Hk, Q or 1, S]."""
    return values[:, None].expand(-1, clusters.shape[1], -1).gather(-1, clusters)


FLAT = "flat"  # name of the lookup that scores all finest clusters


@dataclass(frozen=True)
class Thresholds:
    """Calibrated score thresholds of one lookup: for decode steps, and for a question's prefill.

    A question's tokens share one selection by their mean scores, which are flatter than those of a single token. The
    scores of a hierarchical lookup are normalised over fewer clusters than those of a flat one. Each kind of selection
    and of lookup has thresholds of its own.

    Args:
        calibration: the method's calibration in the manifest.
        lookup: `flat` or `hierarchical`.
    """

    calibration: dict[str, Any]
    lookup: str

    def __post_init__(self) -> None:
        """Raise ValueError, KeyError or TypeError for a malformed calibration; calibrations are read from manifests."""
        for joint, flat in product((False, True), repeat=2):
            found = self._of(joint, flat)
            kept, thresholds = np.array(found["curve"], dtype=float).T
            coarse = np.array(found["coarse_thresholds"], dtype=float)
            finite = all(np.isfinite(numbers).all() for numbers in (kept, thresholds, coarse))
            if coarse.ndim != 1 or not finite or (kept <= 0).any() or not (thresholds > 0).any():
                raise ValueError("a calibration curve is no list of shares and thresholds")

    def coarse(self, depth: int, *, joint: bool) -> float:
        """Return the threshold of a coarse level; depth 1 is the coarsest. `joint`: for a question's prefill."""
        return float(self._of(joint, flat=False)["coarse_thresholds"][depth - 1])

    def finest(self, share: float, *, joint: bool, flat: bool) -> float:
        """Return the threshold with which a target share of the middle's tokens is selected; 0 for a share of 1.

        Interpolates between the calibrated points (share, threshold), on logarithmic axes. `joint`: for a prefill.
        `flat`: for scores of all finest clusters, which a hierarchical lookup also computes if the share is large.
        """
        if share >= 1:
            return 0.0
        kept, thresholds = np.array(self._of(joint, flat)["curve"]).T
        known = thresholds > 0
        return float(np.exp(np.interp(np.log(share), np.log(kept[known]), np.log(thresholds[known]))))

    def _of(self, joint: bool, flat: bool) -> dict[str, Any]:
        found: dict[str, Any] = self.calibration["prefill" if joint else "decode"][FLAT if flat else self.lookup]
        return found


@dataclass(frozen=True)
class WindowedRope:
    """A layer's RoPE, for a lookup in which every query is at the same distance from every key.

    Attributes:
        frequencies: [P] float32, of P pairs of channels.
        interleaved: whether the channels of a pair are neighbours.
        distance: the distance between queries and keys in the lookup, in tokens.
        first_token: position in the prompt of the first indexed token.
    """

    frequencies: torch.Tensor
    interleaved: bool
    distance: int
    first_token: int

    @classmethod
    def of_layer(cls, context: MiddleContext, distance: int) -> Self:
        """Create a `WindowedRope` for a layer whose keys were clustered with RoPE undone.

        Raises:
            ValueError: the index lacks the layer's RoPE frequencies.
        """
        rope = context.facts.rope
        if rope is None:
            raise ValueError("the layer has no RoPE frequencies")
        frequencies = torch.tensor(rope.frequencies, dtype=torch.float32, device=context.tensors["token_order"].device)
        return cls(frequencies, rope.interleaved, distance, context.first_token)

    def query(self, queries: Queries) -> torch.Tensor:
        """Rotate the queries [Hk, G, Q, D] from the positions of their tokens to position `distance`."""
        rotated = rotate(queries.query, self.distance - queries.positions(), self.frequencies, self.interleaved)
        return rotated.to(queries.query.dtype)

    def undo(self, keys: torch.Tensor, first: int) -> torch.Tensor:
        """Rotate the keys [Hk, T, D] of indexed tokens, from index `first` on, back to position 0; return float32."""
        start = self.first_token + first
        positions = torch.arange(start, start + keys.shape[1], device=keys.device)
        return rotate(keys, -positions, self.frequencies, self.interleaved)


@dataclass(frozen=True)
class ClusterSteps:
    """Steps that select clusters of one layer with kernels.

    Attributes:
        tree: the clusters that are scored.
        keys, values: each level's centroids [Hk, C, D] to which queries attend. If `replaces` is False, `values` may be
            empty. Then `keys` are passed instead of values, which no kernel reads.
        starts: [Hk, C] int64, first row of each finest cluster.
        first_row: `starts` in int32, for kernels.
        counted: the scored finest clusters, with logarithms of their counts, for the step of a CPU.
        below: number of children and first child [Hk, C] int32 of each cluster of the level above the finest; None if
            kernels do not support a hierarchical lookup in these clusters.
        own: whether the scored centroids of `tree` are `keys`; if not, they are centroids for windowed RoPE.
        replaces: whether queries attend to centroids instead of the tokens that are not selected.
        in_8_bits: int8 centroids of the finest level for kernels of a flat lookup; None: kernels read `keys` and
            `values`.
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
    replaces: bool
    in_8_bits: Int8Kernel | None = None

    @property
    def rows(self) -> int:
        """Number of rows read per scored cluster: the scored centroid and, if `replaces`, the value centroid.

        With windowed RoPE and `replaces`, the centroid of the keys at their true positions is read, too.
        """
        if not self.replaces:
            return 1
        return 2 if self.own else 3

    @property
    def rows_of_union(self) -> float:
        """Number of rows read if several queries select down the levels and attend to all finest centroids.

        This is an upper bound if there are more than two levels, because not all clusters of the levels between the
        coarsest and the finest are scored.
        """
        finest, *coarser = (centroids.shape[1] for centroids in self.tree.centroids)
        return float(finest * self.rows + sum(coarser))

    def flat(
        self, query: torch.Tensor, tokens: int, threshold: float | None = None, counter: torch.Tensor | None = None
    ) -> Selection:
        """Select the best of all finest clusters, on a GPU.

        Args:
            query: [Hk, G, 1, D].
            tokens: maximum number of tokens to select.
            threshold: select every cluster whose score reaches it, up to `tokens` tokens; None: the best clusters.
            counter: [Hk] int64, to which the number of tokens selected by threshold is added.
        """
        counts, numbers = self.tree.counts[0], self.in_8_bits
        centroids = self.tree.centroids[0] if numbers is None else numbers
        looked = query[:, :, 0], centroids, counts, self.first_row
        chosen = choose_clusters(*looked, tokens, *self.facts.scaling, threshold, counter)
        values = (self.values or self.keys)[0]
        # With windowed RoPE, the logits of the scored centroids differ from those of the attention. Then they are not
        # passed on.
        scored = None
        if numbers is not None:
            scored = ScoredCentroids(chosen.logits, chosen.log_left, numbers.values, scales=numbers.scales)
        elif self.own:
            scored = ScoredCentroids(chosen.logits, chosen.log_left, values)
        left = CentroidSegment(self.keys[0], chosen.log_left[:, None, : counts.shape[1]], values, scored)
        return Selection(
            self._rows(chosen, self.starts, tokens, tokens if threshold is None else 0),
            Cost(float(counts.shape[1] * self.rows), per_count=0 if threshold is None else 2),
            Residual(lambda: (left,), attended=self.replaces),
        )

    def together(
        self,
        query: torch.Tensor,
        ends: torch.Tensor,
        tokens: int,
        capacity: int,
        thresholds: torch.Tensor | None,
        counter: torch.Tensor | None,
    ) -> Selection:
        """Select the union of several sequences' clusters on a GPU; each sequence selects among all finest clusters.

        Args:
            query: [Hk, G, T, D], tokens of all sequences, one sequence after another.
            ends: [B] int32, the end of each sequence in the T tokens, exclusive.
            tokens: budget of each sequence.
            capacity: largest number of tokens of the union.
            thresholds: [B], threshold of each sequence; None: clusters are selected up to the budget.
            counter: [Hk] int64, to which the number of selected tokens is added.
        """
        centroids, counts = self.tree.centroids[0], self.tree.counts[0]
        values = (self.values or self.keys)[0]
        looked = query, ends, centroids, counts, self.first_row
        chosen = choose_together(*looked, tokens, capacity, *self.facts.scaling, thresholds, counter)
        left = CentroidSegment(self.keys[0], chosen.log_left[:, None, : counts.shape[1]], values)
        indices = RowIndices(chosen.rows, chosen.used, None)
        return Selection(
            RowSet(self.starts[:, None], chosen.lengths[:, None], capacity, 0, indices),
            Cost(float(counts.shape[1] * self.rows), per_count=2),
            Residual(lambda: (left,), attended=self.replaces),
        )

    def down(
        self, query: torch.Tensor, wanted: int, slots: int, tokens: int, counter: torch.Tensor | None
    ) -> Selection:
        """Select clusters in two levels on a GPU: open the best coarse clusters, and select the best of their children.

        Args:
            query: [Hk, G, 1, D].
            wanted: coarse clusters are opened until they have this many children and `tokens` tokens.
            slots: upper bound of the number of children of the opened clusters.
            tokens: number of tokens to select.
            counter: [Hk] int64, to which the number of opened children is added. If it is not None, the centroids of
                the unselected tokens are returned with logits, for kernels that attend in place.
        """
        assert self.below is not None
        (fine, coarse), (counts, coarse_counts) = self.tree.centroids, self.tree.counts
        (children, first_child), q = self.below, query[:, :, 0]
        of_coarse, in_place = Children(children, first_child, slots, counter), counter is not None
        opened = open_clusters(q, coarse, coarse_counts, of_coarse, wanted, tokens, *self.facts.scaling)
        below = opened.rows, opened.used
        listed = choose_listed(q, fine, counts, self.first_row, below, tokens, *self.facts.scaling)
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
            Cost(
                (coarse.shape[1] + (0.0 if in_place else opened.used[:, None])) * self.rows,
                self.rows if in_place else 0,
                shared=float(coarse.shape[1] * self.rows),
            ),
            Residual(
                left,
                attended=self.replaces,
                in_place=scored if self.replaces and in_place else None,
                rows_of_union=self.rows_of_union,
            ),
        )

    def _rows(self, chosen: ClusterChoice, starts: torch.Tensor, tokens: int, total: int) -> RowSet:
        indices = RowIndices(chosen.rows, chosen.used, chosen.queue)
        return RowSet(starts[:, None], chosen.lengths[:, None], tokens, total, indices)

    def best(self, query: torch.Tensor, tokens: int) -> Selection:
        """Select the best clusters of the finest level for one query, on a CPU.

        The selection's `RowSet` may contain empty runs.
        """
        keys = self.keys[0]
        best = best_clusters(query.squeeze(2), self.counted, tokens, *self.facts.scaling)

        def left() -> tuple[CentroidSegment, ...]:
            share, values = best.log_share_left(self.counted.shares), (self.values or self.keys)[0]
            # `best.logits` already include the log of the cluster's token count, so only the log of the share of the
            # cluster's unselected tokens is added.
            scored = ScoredCentroids(best.logits, share.squeeze(1), values) if self.own else None
            return (CentroidSegment(keys, self.counted.log_counts + share, values, scored),)

        starts = self.starts.gather(1, best.clusters).unsqueeze(1)
        return Selection(
            RowSet(starts, best.lengths.unsqueeze(1), tokens, tokens),
            Cost(float(keys.shape[1] * self.rows)),
            Residual(left, attended=self.replaces),
        )
