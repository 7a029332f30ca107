"""Selector of clusters by their centroids, flat or hierarchical, and the base class of its methods.

Centroids can represent the clusters that are not selected.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from sparsekv.formats.errors import REBUILD, ArtifactError, UsageError, check_choice
from sparsekv.formats.index.context_rows import Pair
from sparsekv.formats.index.schema import MethodRecord
from sparsekv.kernels.attention.cpu_steps import StepClusters, attend_to_best
from sparsekv.kernels.clusters.cluster_choice import (
    MOST_CLUSTERS,
    MOST_TOKENS,
    OPENED_BITS,
    SCORE_BITS,
    CountedClusters,
    Tree,
    best_first,
    child_scores,
    fewest_tokens,
    until_enough,
)
from sparsekv.kernels.common.kernel_inputs import Int8Kernel
from sparsekv.kernels.common.row_operations import fill_budget
from sparsekv.kernels.scores.logits import cluster_scores
from sparsekv.runtime.selection.cluster_statistics import Clustering, describe_clusters
from sparsekv.runtime.selection.clusters.steps import (
    FLAT,
    ClusterSteps,
    LevelCentroids,
    Scored,
    Thresholds,
    WindowedRope,
    of_clusters,
)
from sparsekv.runtime.selection.clusters.stream import BlockClustering, ClusterStream, lookup_tensors
from sparsekv.runtime.selection.interface import (
    Appended,
    Appending,
    Budget,
    CentroidSegment,
    Cost,
    InPlace,
    Method,
    MiddleContext,
    Queries,
    Residual,
    RowSet,
    Selection,
    Selector,
    SelectorKernels,
    SelectorReport,
)

OPENED = 4.0
"""Default of `opened`. As measured, scoring half of all clusters instead hardly increases the attention mass."""
OF_LEVELS = ("centroids", "lookup_centroids", "value_centroids", "counts", "parent", "first_child", "children")


class ClusterSelector(Selector):
    """Selects clusters of one layer. Each run of rows in a selection is a cluster, in the artifact's token order.

    Args:
        hierarchical: score only the children of the best coarse clusters, instead of all finest clusters.
        opened: share of a finer level's clusters that a hierarchical lookup scores, as a multiple of the budget's
            share. The lookup scores at most about half of the second coarsest level's clusters, a quarter of those of
            the next level, and so on.
        thresholds: select clusters whose score reaches a threshold; None: the best clusters up to the budget.
        replace: attend to centroids instead of the tokens that are not selected.
        clustering: parameters for clustering new tokens; None: new tokens are not appended.
        append_size: number of new tokens that are appended at a time.
        windowed_rope: score lookup centroids, which are means of keys with RoPE undone; None: score centroids of keys
            with RoPE.

    Raises:
        ArtifactError: the index's clusters lack centroids that these options need.
    """

    def __init__(
        self,
        context: MiddleContext,
        *,
        hierarchical: bool,
        opened: float = OPENED,
        thresholds: Thresholds | None = None,
        replace: bool = False,
        clustering: BlockClustering | None = None,
        append_size: int = 0,
        windowed_rope: WindowedRope | None = None,
    ):
        self.facts, self.hierarchical, self.thresholds, self.replace = context.facts, hierarchical, thresholds, replace
        self.stream, self.windowed_rope, self.opened = None, windowed_rope, opened
        self.append_size = append_size
        # An index from another source may lack tensors that kernels read without a check.
        taken = {"value_centroids": replace or clustering is not None, "lookup_centroids": windowed_rope is not None}
        for name in (f"level0.{part}" for part, is_taken in taken.items() if is_taken):
            if name not in context.tensors:
                raise ArtifactError(f"the index's clusters lack {name}; {REBUILD}")
        if clustering is None:
            self._look_in(lookup_tensors(context.tensors), context.centroids_in_8_bits)
        else:
            self.stream = ClusterStream(context.tensors, clustering, windowed_rope)
            self._look_in(self.stream.found())

    def _look_in(self, found: dict[str, torch.Tensor], in_8_bits: Int8Kernel | None = None) -> None:
        """Set the clusters to select from. Takes no sync if there is one level, and a few syncs for each further level.

        Args:
            found: the tensors of `lookup_tensors`.
            in_8_bits: int8 centroids of the finest clusters for kernels. None if the index stores no int8 centroids, or
                if the selector can append tokens, because an append changes centroids.
        """
        levels = sum(name.endswith(".centroids") for name in found)
        of_levels = {
            name: tuple(found[f"level{level}.{name}"] for level in range(levels) if f"level{level}.{name}" in found)
            for name in OF_LEVELS
        }
        self.parents, self.values = of_levels.pop("parent"), of_levels.pop("value_centroids")
        self.keys, scored = of_levels.pop("centroids"), of_levels.pop("lookup_centroids")
        scored = () if self.windowed_rope is None else scored
        self.tree = Tree(scored or self.keys, **of_levels)
        self.layout, self.starts = found["token_order"], found["starts"]
        self._centroids = LevelCentroids(
            self.keys, self.values, self.tree.counts, self.parents, self.layout, self.starts
        )
        self.middle = self.layout.shape[1]
        self.fewest_tokens = [fewest_tokens(counts) for counts in self.tree.counts[: len(self.parents)]]
        self.most_children = [int(children.max()) for children in self.tree.children]
        self.open_row = 0 if self.stream is None else self.stream.open.row
        logs, shares = found["level0.log_counts"].unsqueeze(1), found["level0.shares"]
        below = None
        if len(self.parents) == 1 and self.windowed_rope is None:  # kernels support two levels, without windowed RoPE
            below = self.tree.children[0].int(), self.tree.first_child[0].int()
        self.steps = ClusterSteps(
            tree=self.tree,
            keys=self.keys,
            values=self.values,
            starts=self.starts,
            first_row=found["first_row"],
            counted=CountedClusters(self.tree.centroids[0], self.tree.counts[0], logs, shares, self.middle),
            below=below,
            facts=self.facts,
            own=not scored,
            replaces=self.replace,
            in_8_bits=in_8_bits if self.keys[0].is_cuda and not self.hierarchical and not scored else None,
        )
        values, facts = self.values[0] if self.values else None, self.facts
        self.fused = StepClusters(self.steps.counted, self.starts, values, *facts.scaling)

    @property
    def kernels(self) -> SelectorKernels:
        return SelectorKernels(
            self.attend_fused,
            choose_together=self.choose_together,
            chooses_together=self.chooses_together,
            rows_in_8_bits=0 if self.steps.in_8_bits is None else self.starts.shape[1] * self.steps.rows,
        )

    @property
    def append(self) -> Appending | None:
        if (stream := self.stream) is None:
            return None

        def append(keys: torch.Tensor, values: torch.Tensor) -> Appended:
            appended = stream.append(keys, values)
            self._look_in(stream.found())
            return appended

        def remove() -> torch.Tensor | None:
            order = stream.remove_appended()
            if order is not None:
                self._look_in(stream.found())
            return order

        return Appending(self.append_size, lambda: self.open_row, append, remove)

    def replace_by_own(self) -> bool:
        self.replace = bool(self.values)
        self.steps = replace(self.steps, replaces=self.replace)
        return self.replace

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select clusters.

        A selection up to a budget needs no sync. A selection by threshold needs one sync per scored level. The
        exception is a decode step of one query on a GPU that scores all finest clusters, of at most `MOST_TOKENS`
        tokens, and reads rows in place: it needs none.
        """
        query = queries.query if self.windowed_rope is None else self.windowed_rope.query(queries)
        flat = self._is_flat(budget)
        if query.shape[2] == 1 and not queries.joint and (step := self._step(query, budget, flat, queries.in_place)):
            return step
        scored = [self._score_level(query, 0 if flat else len(self.tree.centroids) - 1, queries.joint)]
        while scored[-1].level:
            scored.append(self._score_children(query, scored[-1], budget, queries.joint))
        lengths, capacity = self._choose(scored[-1], budget, queries.joint)
        coarsest = float(scored[0].read * self.steps.rows)
        return Selection(
            RowSet(of_clusters(self.starts, scored[-1].clusters), lengths, capacity),
            Cost(sum((one.read * self.steps.rows for one in scored[1:]), coarsest), shared=coarsest),
            Residual(
                lambda: self._centroids.remainders(scored, lengths),
                attended=self.replace,
                rows_of_union=None if flat else self.steps.rows_of_union,
            ),
        )

    @property
    def report(self) -> SelectorReport:
        return SelectorReport(centroid_of=self._centroids.of_tokens)

    def chooses_together(self, budget: Budget) -> bool:
        """Whether `choose_together` supports a budget: only for flat selections within the limits of the kernel."""
        return self._is_flat(budget) and self.middle <= MOST_TOKENS and self.starts.shape[1] <= MOST_CLUSTERS

    def choose_together(
        self, queries: Queries, ends: torch.Tensor, asks: torch.Tensor, budget: Budget, counter: torch.Tensor | None
    ) -> Selection:
        limits = None
        if self.thresholds is not None:
            share = budget.share(self.middle)
            answer, question = (self.thresholds.finest(share, joint=joint, flat=True) for joint in (False, True))
            # This arithmetic copies no constant to the GPU. A copy is not allowed while a step is captured.
            limits = answer + (question - answer) * asks.float()
        query = queries.query if self.windowed_rope is None else self.windowed_rope.query(queries)
        tokens = min(budget.tokens(self.middle), self.middle)
        capacity = self.middle if limits is not None else min(self.middle, len(ends) * tokens)
        return self.steps.together(query, ends, tokens, capacity, limits, counter)

    def rest_of(self, chosen: torch.Tensor) -> Residual:
        """Return the finest clusters' centroids for the tokens that are False in `chosen` [Hk, M].

        After a hierarchical lookup, these centroids represent the tokens, too, because the queries whose selections
        were united have scored different centroids.
        """
        before = torch.nn.functional.pad(chosen.cumsum(-1), (1, 0))
        counts = self.tree.counts[0].long()
        taken = before.gather(1, self.starts + counts) - before.gather(1, self.starts)
        keys = self.keys[0]
        centroids = CentroidSegment(keys, (counts - taken).float().log()[:, None], (self.values or self.keys)[0])
        return Residual(lambda: (centroids,), attended=self.replace)

    def attend_fused(
        self, query: torch.Tensor, rows: Pair, exact: Pair, budget: Budget, sink_logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, float] | None:
        """Select and attend with one kernel. Returns None for thresholds, windowed RoPE and lookups that are not flat,
        and if no token is selected."""
        tokens = min(budget.tokens(self.middle), self.middle)
        if self.thresholds is not None or self.windowed_rope is not None or not (tokens and self._is_flat(budget)):
            return None
        output = attend_to_best(query, self.fused, rows, exact, tokens, replace=self.replace, sink_logits=sink_logits)
        return output, 2.0 * tokens + self.starts.shape[1] * self.steps.rows

    def _is_flat(self, budget: Budget) -> bool:
        """Whether all finest clusters are scored.

        A hierarchical lookup scores at most 0.5 ** (levels - 1) of the finest clusters. For a budget of more than half
        of this share, all finest clusters are scored, because the hierarchy saves nothing.
        """
        return not self.hierarchical or budget.share(self.middle) > 0.5 ** len(self.tree.centroids)

    def _step(self, query: torch.Tensor, budget: Budget, flat: bool, in_place: InPlace | None) -> Selection | None:
        """Select for one query with kernels; None if no kernel supports the case."""
        tokens = min(budget.tokens(self.middle), self.middle)
        counter = None if in_place is None else in_place.counter
        if self.middle > MOST_TOKENS:
            return None
        if self.thresholds is not None:
            if not (flat and counter is not None and query.is_cuda):
                return None
            threshold = self.thresholds.finest(budget.share(self.middle), joint=False, flat=True)
            return self.steps.flat(query, self.middle, threshold, counter)
        if not query.is_cuda:
            return self.steps.best(query, tokens) if flat and tokens else None
        if flat:
            return self.steps.flat(query, tokens)
        if self.steps.below is None:
            return None
        return self.steps.down(query, self._wanted(0, 1, budget), self._slots(0, 1, budget), tokens, counter)

    def _score_level(self, query: torch.Tensor, level: int, joint: bool) -> Scored:
        centroids, counts = self.tree.centroids[level], self.tree.counts[level]
        scores = cluster_scores(query, centroids, counts, *self.facts.scaling)
        scores = scores.mean(1, keepdim=True) if joint else scores
        clusters = torch.arange(scores.shape[2], device=scores.device).expand_as(scores)
        return Scored(level, clusters, scores, counts[:, None].expand_as(scores), float(scores.shape[2]))

    def _score_children(self, query: torch.Tensor, above: Scored, budget: Budget, joint: bool) -> Scored:
        """Score the children of the opened clusters, with a softmax over these children only."""
        level = above.level - 1
        starts, lengths, capacity = self._open(above, budget, joint)
        scores, clusters, counts = child_scores(query, self.tree, level, starts, lengths, capacity, *self.facts.scaling)
        scores = scores.mean(1, keepdim=True) if joint else scores
        return Scored(level, clusters, scores, counts, lengths.sum(-1))

    def _open(self, above: Scored, budget: Budget, joint: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Open the best parents and return their children as runs: starts, lengths and an upper bound of their number.

        With thresholds, the parents that reach the level's threshold are opened, and in any case the best parent.
        Without thresholds, parents are opened best first, until they have `_wanted` children and as many tokens as the
        budget.
        """
        level, depth = above.level - 1, len(self.tree.centroids) - above.level
        bits = SCORE_BITS if self.steps.below is None else OPENED_BITS
        order = best_first(above.scores, budget.tokens(self.middle), bits)
        parents = above.clusters.gather(-1, order)
        starts = of_clusters(self.tree.first_child[level], parents)
        # Empty clusters are the last children of the last parent, and so runs without empty clusters stay contiguous.
        children = of_clusters(self.tree.children[level], parents) * (above.counts.gather(-1, order) > 0)
        if self.thresholds is not None:
            alive = (above.scores >= self.thresholds.coarse(depth, joint=joint)) & (above.counts > 0)
            # Without the best parent, a head in which no parent reaches the threshold would have no children, and a
            # softmax over no scores.
            alive = alive.gather(-1, order) | (torch.arange(order.shape[-1], device=order.device) == 0)
            lengths = children * alive
            return starts, lengths, int(lengths.sum(-1).max())
        opened = until_enough(
            above.counts.gather(-1, order), children, self._wanted(level, depth, budget), budget.tokens(self.middle)
        )
        return starts, children * opened, self._slots(level, depth, budget)

    def _wanted(self, level: int, depth: int, budget: Budget) -> int:
        """Return the number of clusters to score in a level, `depth` levels below the coarsest, for a budget."""
        clusters = self.tree.centroids[level].shape[1]
        return round(clusters * min(0.5**depth, self.opened * budget.share(self.middle)))

    def _slots(self, level: int, depth: int, budget: Budget) -> int:
        """Return an upper bound of the number of clusters scored in a level, `depth` levels below the coarsest.

        The bound exceeds `_wanted` by the children of one parent, because all children of the last opened parent are
        scored. It is larger if `_wanted` clusters may have fewer tokens than the budget.
        """
        enough = int(torch.searchsorted(self.fewest_tokens[level], budget.tokens(self.middle))) + 1
        most = max(self._wanted(level, depth, budget), enough) + self.most_children[level]
        return min(most, self.tree.centroids[level].shape[1])

    def _choose(self, scored: Scored, budget: Budget, joint: bool) -> tuple[torch.Tensor, int]:
        """Compute the number of tokens to select from each scored cluster, and an upper bound of their total."""
        if self.thresholds is not None:
            threshold = self.thresholds.finest(budget.share(self.middle), joint=joint, flat=self._is_flat(budget))
            kept = scored.counts.long() * (scored.scores >= threshold)
            return kept, int(kept.sum(-1).max())
        tokens = budget.tokens(self.middle)
        order = best_first(scored.scores, tokens)
        lengths = fill_budget(scored.counts.gather(-1, order).long(), tokens)
        return torch.zeros_like(lengths).scatter_(-1, order, lengths), tokens


LOOKUPS = (FLAT, "hierarchical")


@dataclass(frozen=True)
class ClusterMethod(Method):
    """Scores clusters flat (all of the finest level) or hierarchically (down the levels of the index)."""

    needs_index: ClassVar[bool] = True
    estimates_missed: ClassVar[bool] = True
    lookup: str = field(
        default="flat",
        metadata={
            "help": f"Which clusters are scored: all of the finest level, or level by level: {', '.join(LOOKUPS)}."
        },
    )
    opened: float = field(
        default=OPENED,
        kw_only=True,
        metadata={
            "needs": {"lookup": "hierarchical", "selection": "budget"},
            "help": "With --lookup hierarchical, the share of a finer level's clusters that is scored, as a multiple "
            "of the budget's share: 4 at a budget of 5% scores 20%. At most half of the second "
            "level is scored, and a quarter of the third.",
        },
    )

    def __post_init__(self) -> None:
        check_choice("--lookup", self.lookup, LOOKUPS)
        if not self.opened > 0:
            raise UsageError(f"--opened {self.opened:g}: give a number above 0, such as {OPENED:g}")

    def can_unite(self) -> bool:
        """Return True: the finest clusters can represent the tokens that none of the queries selects."""
        return True

    def is_hierarchical(self, context: MiddleContext) -> bool:
        """Whether the lookup is hierarchical; raises UsageError if it is and the index has only one level."""
        if self.lookup == "hierarchical" and "level1.centroids" not in context.tensors:
            raise UsageError(
                "--lookup hierarchical: the index has one level of clusters, and this lookup needs two; build "
                "the index again with two, such as --levels 0.05,0.01"
            )
        return self.lookup == "hierarchical"

    @classmethod
    def lookups(cls, record: MethodRecord | None) -> tuple[str, ...]:
        """Return the lookups that an index supports: hierarchical only if it has several levels."""
        levels = () if record is None else record.parameters.get("levels")
        return LOOKUPS if isinstance(levels, Sequence) and len(levels) > 1 else LOOKUPS[:1]

    @classmethod
    def describe_clusters(cls, context: MiddleContext, values: torch.Tensor, biggest: int) -> Clustering:
        return describe_clusters(context.tensors, context.keys, values, context.first_token, biggest)
