"""Extensions of any selector: centroids for the tokens that it does not select, and a union of several selections."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain

import torch

from sparsekv.runtime.selection.interface import (
    Budget,
    CentroidSegment,
    ConversationState,
    Cost,
    Queries,
    Residual,
    RowIndices,
    RowSet,
    Selection,
    Selector,
    SelectorReport,
)


def unite(selection: Selection, selector: Selector, middle: int, capacity: int | None = None) -> Selection:
    """Unite the selections of all queries to one selection for all of them.

    The index rows that all queries share count once (see `Cost`), and all other rows are summed over the queries. The
    sum is an upper bound, because two queries may read the same rows. The sum of `Cost.unshared` is limited to one row
    per middle token. If queries attend to centroids of unselected tokens, the number of rows is
    `Residual.rows_of_union` instead, unless that is None.

    Args:
        selection: one selection for each query.
        selector: the selector that made the selection. The method's `can_unite` must return True.
        middle: number of tokens M of the middle.
        capacity: number of row slots to allocate, at least the size of the union. None: the size of the union, which
            takes a sync.
    """
    chosen = chosen_rows(selection.rows, middle)
    used, place = chosen.sum(-1, dtype=torch.int32), chosen.cumsum(-1) - 1
    most = max(1, int(used.max())) if capacity is None else capacity
    rows = torch.zeros(len(chosen), most + 1, dtype=torch.int32, device=chosen.device)
    everywhere = torch.arange(middle, dtype=torch.int32, device=chosen.device).expand_as(chosen)
    rows.scatter_(1, torch.where(chosen, place, most), everywhere)
    valid = torch.arange(most, device=chosen.device) < used[:, None]
    read, rest = selection.cost.index_rows, None
    shared, own = selection.cost.shared, selection.cost.unshared
    if isinstance(read, torch.Tensor):
        read = (read - shared - own).expand(len(chosen), -1).sum(1, keepdim=True) + shared + own
    read = read + min((selection.rows.starts.shape[1] - 1) * own, max(0.0, middle - own))
    if selection.rest is not None and selection.rest.attended:
        rest = selector.rest_of(chosen)
        read = read if selection.rest.rows_of_union is None else selection.rest.rows_of_union
    return replace(
        selection,
        rows=RowSet(rows[:, None, :most], valid.long()[:, None], most, indices=RowIndices(rows, used, None)),
        cost=Cost(read, selection.cost.per_count),
        rest=rest,
    )


def join_selections(selections: Sequence[Selection]) -> Selection:
    """Join selections of one query each to one selection, with rows and cost for each query.

    The other fields, such as `rest`, are those of the first selection.
    """
    most, read = max(one.rows.starts.shape[2] for one in selections), selections[0].cost.index_rows
    starts, lengths = (
        torch.cat([torch.nn.functional.pad(rows, (0, most - rows.shape[2])) for rows in parts], 1)
        for parts in ([one.rows.starts for one in selections], [one.rows.lengths for one in selections])
    )
    if isinstance(read, torch.Tensor):
        read = torch.cat([torch.as_tensor(one.cost.index_rows) for one in selections], 1)
    rows = RowSet(starts, lengths, max(one.rows.capacity for one in selections))
    return replace(selections[0], rows=rows, cost=replace(selections[0].cost, index_rows=read))


def chosen_rows(rows: RowSet, middle: int) -> torch.Tensor:
    """Mark the rows that at least one query selects: [Hk, M] bool, in the layout's order."""
    places, valid = rows.expand()
    places = places if valid is None else torch.where(valid, places, middle)
    chosen = torch.zeros(len(places), middle + 1, dtype=torch.bool, device=places.device)
    return chosen.scatter_(1, places.flatten(1), True)[:, :middle]


def unite_groups(selection: Selection, selector: Selector, middle: int, together: int) -> Selection:
    """Unite the selections of Q queries [Hk, Q, ...] in groups of `together` queries; a group takes every n-th query.

    Returns a selection for each query, which is the union of the query's group. There are n = Q // `together` groups,
    but at least one. If Q is no multiple of `together`, some groups are larger. If Q is less than `together`, all
    queries are one group.
    """
    Q = selection.rows.starts.shape[1]
    groups = max(1, Q // together)
    united = [unite(selection.of_queries(slice(group, None, groups)), selector, middle) for group in range(groups)]
    group_of = torch.arange(Q, device=selection.rows.starts.device) % groups
    most = max(one.rows.capacity for one in united)
    starts, lengths = (
        torch.stack([torch.nn.functional.pad(rows[:, 0], (0, most - rows.shape[2])) for rows in parts], 1)[:, group_of]
        for parts in ([one.rows.starts for one in united], [one.rows.lengths for one in united])
    )
    reads = [torch.as_tensor(one.cost.index_rows).expand(len(starts), 1) for one in united]
    rest = None if united[0].rest is None else _rest_of_groups(united, group_of)
    return replace(
        selection, rows=RowSet(starts, lengths, most), cost=Cost(torch.cat(reads, 1)[:, group_of]), rest=rest
    )


def _rest_of_groups(united: list[Selection], group_of: torch.Tensor) -> Residual:
    parts = list(chain.from_iterable(one.attended_segments() for one in united))
    log_counts = torch.cat([part.log_counts for part in parts], 1)[:, group_of]
    segment = CentroidSegment(parts[0].keys, log_counts, parts[0].values)
    return Residual(lambda: (segment,), attended=True)


@dataclass(frozen=True)
class ResidualClusters:
    """Clusters of a residual: each token between sinks and tail is in exactly one cluster.

    The fields are key and value centroids [Hk, C, D], token counts [Hk, C], and `labels` [Hk, M], each token's cluster.
    """

    keys: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor
    labels: torch.Tensor

    def left(self, clusters: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Count the tokens of each cluster that are not selected: [Hk, Q or 1, C] float32.

        Args:
            clusters: [Hk, Q or 1, K], the cluster of each selected token.
            chosen: [Hk, Q or 1, K] bool, mask of the valid selected tokens; None: all are valid.
        """
        each = torch.ones_like(clusters, dtype=torch.float32) if chosen is None else chosen.float()
        counts = self.counts[:, None].expand(-1, clusters.shape[1], -1).float()
        return counts.scatter_add(-1, clusters, -each)


def residual_clusters(tensors: dict[str, torch.Tensor]) -> ResidualClusters:
    """Read the finest clusters from a method's tensors, with positions counted from the first token after the sinks."""
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
    """Adds a residual to another selector: each centroid represents the tokens of its cluster that were not selected.

    `layout`, `graph_state`, `conversation`, `report.covered` and `question_piece` are those of the inner selector. This
    selector cannot append, because new tokens are in no cluster. This selector has no kernels, because the inner
    selector's kernels do not attend to the residual's centroids.

    Args:
        inner: selects the rows.
        clusters: the clusters of all middle tokens, whose centroids represent the tokens that are not selected.
    """

    def __init__(self, inner: Selector, clusters: ResidualClusters):
        self.inner, self.clusters = inner, clusters
        self.layout, self.question_piece = inner.layout, inner.question_piece
        labels = clusters.labels
        self.labels = labels if self.layout is None else labels.gather(1, self.layout)

    def graph_state(self) -> int | None:
        return self.inner.graph_state()

    @property
    def conversation(self) -> ConversationState | None:
        return self.inner.conversation

    @property
    def report(self) -> SelectorReport:
        """Report functions: a token's centroid is that of the token's cluster; `covered` is the inner selector's."""
        inner = self.inner.report
        return SelectorReport(None if inner is None else inner.covered, lambda rest: self.clusters.labels)

    def __copy__(self) -> "ResidualSelector":
        """Copy the inner selector too, so that the copy has its own conversation state."""
        return ResidualSelector(copy(self.inner), self.clusters)

    def rest_of(self, chosen: torch.Tensor) -> Residual:
        left = self.clusters.left(self.labels[:, None], chosen[:, None])
        centroids = CentroidSegment(self.clusters.keys, left.log(), self.clusters.values)
        return Residual(lambda: (centroids,), attended=True)

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select the same rows as the inner selector; also read all key and value centroids."""
        chosen = self.inner.select(queries, budget)
        rows, valid = chosen.rows.expand()
        cluster = self.labels[:, None].expand(-1, rows.shape[1], -1).gather(-1, rows)
        left = self.clusters.left(cluster, valid)
        centroids = CentroidSegment(self.clusters.keys, left.log(), self.clusters.values)
        cost, centroids_read = chosen.cost, 2.0 * self.clusters.keys.shape[1]
        cost = replace(cost, index_rows=cost.index_rows + centroids_read, shared=cost.shared + centroids_read)
        return replace(chosen, cost=cost, rest=Residual(lambda: (centroids,), attended=True))
