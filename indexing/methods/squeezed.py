"""Indexer of Squeezed Attention (arXiv 2411.09688): k-means of keys (section 3.1) and a hierarchy (section 3.3).

Keys are clustered by cosine, and a centroid is the mean of its cluster's unnormalised keys. The centroids are clustered
again for each coarser level. The global threshold (appendix C) is calibrated on the first half of the tail's queries;
the tail's keys are not clustered. Decoding and a question's prefill have separate thresholds, because averaging over a
question's queries flattens the scores.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from sparsekv.indexing.indexers.cluster_indexer import ClusterIndexer
from sparsekv.indexing.indexers.interface import BuiltLayer, KeepCurve, LayerInput, Tensors, indexers
from sparsekv.kernels.scores.logits import attention_logits, scores_from_logits

QUESTION_TOKENS = 16  # queries over which one calibrated prefill lookup averages its scores
REPORTED_KEEP = 0.05  # share of tokens; the manifest records what this share's threshold keeps on held-out queries


@indexers.register("squeezed")
@dataclass(frozen=True)
class SqueezedIndexer(ClusterIndexer):
    """Clusters the keys of all tokens between sinks and tail as a whole, not block by block."""

    revision: ClassVar[int] = 2

    def build_layer(self, layer: LayerInput) -> Tensors:
        """Build levels of key centroids, the token order, and value centroids, which `--residual` uses."""
        return self.cluster(layer.keys, layer.values, layer.split.sinks)

    def calibrate(self, layers: Callable[[], Iterator[BuiltLayer]]) -> dict[str, Any]:
        """Calibrate the score thresholds of each kind of lookup, and the share of tokens that each threshold keeps.

        The kinds are `decode` and `prefill`; each has a `flat` lookup and, with several levels, a `hierarchical` one.
        """
        deepest = len(self.levels) - 1
        found = {
            kind: {"flat": _Lookup(group, 0)} | ({"hierarchical": _Lookup(group, deepest)} if deepest else {})
            for kind, group in (("decode", 1), ("prefill", QUESTION_TOKENS))
        }
        lookups = [lookup for of_kind in found.values() for lookup in of_kind.values()]
        # Each pass over the layers handles all lookups, because reading a layer costs more time than scoring its
        # clusters.
        for depth in range(deepest + 1):
            for layer in layers():
                for lookup in lookups:
                    lookup.add(layer, depth)
            for lookup in lookups:
                lookup.finish(depth)
        return {kind: {name: lookup.record() for name, lookup in of_kind.items()} for kind, of_kind in found.items()}


@dataclass
class _Lookup:
    """Calibration of one kind of lookup, level by level from the coarsest.

    Each level but the finest gets a threshold. The threshold of the coarsest level keeps half of all tokens. Each
    further threshold keeps half of the tokens that the level above keeps. The finest level gets a curve: the share of
    tokens kept at each threshold. `held_out` is the same curve on other queries. `group` is the number of queries whose
    scores are averaged, and `coarse` the index of the coarsest level.
    """

    group: int
    coarse: int
    thresholds: list[float] = field(default_factory=list)
    curve: KeepCurve = field(default_factory=KeepCurve)
    held_out: KeepCurve = field(default_factory=KeepCurve)

    def add(self, layer: BuiltLayer, depth: int) -> None:
        """Add a layer's scores to the curve of the level `depth` levels below the coarsest, if there is such a level.

        At the finest level, scores of other queries are also added to `held_out`.
        """
        if depth > self.coarse:
            return
        self.curve.add(*_level_scores(layer, self.coarse, self.thresholds, self.group, held_out=False))
        if depth == self.coarse:
            self.held_out.add(*_level_scores(layer, self.coarse, self.thresholds, self.group, held_out=True))

    def finish(self, depth: int) -> None:
        """Append the threshold of the level at `depth` and reset the curve, unless the level is the finest."""
        if depth < self.coarse:
            self.thresholds.append(self.curve.threshold(0.5 ** (depth + 1)))
            self.curve = KeepCurve()

    def record(self) -> dict[str, Any]:
        threshold = self.curve.threshold(REPORTED_KEEP)
        return {
            "coarse_thresholds": self.thresholds,
            "curve": self.curve.points(),
            "held_out_keep": {"target": REPORTED_KEEP, "kept": self.held_out.share_above(threshold)},
        }


def _level_scores(
    layer: BuiltLayer, coarse: int, thresholds: list[float], group: int, *, held_out: bool
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return scores and counts of the clusters of the first level without a threshold, and the number of tokens M.

    Clusters whose parent is not opened have a count of 0. A parent is opened if it reaches its level's threshold, or is
    its head's best. With `held_out`, the queries are the second half of the tail's, otherwise the first half.
    """
    half = layer.tail_queries.shape[1] // 2
    queries = layer.tail_queries[:, half:] if held_out else layer.tail_queries[:, :half]
    level, alive = coarse, torch.ones((), device=queries.device)
    scores, counts = _pooled(layer, queries, level, alive, group)
    for threshold in thresholds:
        parent = layer.tensors[f"level{level - 1}.parent"].long()[:, None].expand(-1, scores.shape[1], -1)
        opened = (scores >= threshold) & (counts > 0)
        # As in decoding, a head's best cluster is opened even if no cluster reaches the threshold.
        opened = opened.scatter(2, scores.argmax(2, keepdim=True), True)
        alive = opened.gather(2, parent)
        level -= 1
        scores, counts = _pooled(layer, queries, level, alive, group)
    return scores, counts, float(layer.tensors["token_order"].shape[1])


def _pooled(
    layer: BuiltLayer, queries: torch.Tensor, level: int, alive: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores [Hk, Q / group, C], averaged over `group` queries as in a prefill, and counts of one level.

    `alive` broadcasts to the scores. It is 0 for clusters whose parent is not opened, which get a count of 0.
    """
    centroids = layer.tensors[f"level{level}.centroids"]
    group = min(group, queries.shape[1])
    Hk, pools = centroids.shape[0], queries.shape[1] // group
    grouped = queries[:, : pools * group].reshape(Hk, -1, pools * group, queries.shape[2])
    counts = (layer.tensors[f"level{level}.counts"][:, None] * alive).expand(Hk, pools, -1)
    logits = attention_logits(grouped, centroids, *layer.facts.scaling)
    scores = scores_from_logits(logits, counts.repeat_interleave(group, 1)[:, None])
    return scores.view(Hk, pools, group, -1).mean(2), counts
