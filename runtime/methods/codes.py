"""Decoding with the method `codes`: tokens are selected by product-quantisation codes of keys.

The codes of all keys are scanned, or only the codes of the keys in the best clusters. With `replace`, the clusters'
centroids, with fitted masses and values, represent the tokens that are not selected. One softmax covers selected tokens
and centroids.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Self

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.context_rows import Pair
from sparsekv.formats.index.schema import MethodRecord
from sparsekv.kernels.attention.cluster_step import StepCodes, attend_by_codes, choose_by_codes
from sparsekv.kernels.attention.types import ScoredCentroids
from sparsekv.kernels.common.runs import expand_runs, fill_budget
from sparsekv.kernels.posting_lists.types import ExactKeys
from sparsekv.kernels.scores.logits import attention_logits, best_tokens
from sparsekv.runtime.selection.cluster_statistics import Clustering, describe_clusters
from sparsekv.runtime.selection.code_scan import CodeEstimates, CodeScan, QuestionScan, probability
from sparsekv.runtime.selection.interface import (
    Budget,
    CentroidSegment,
    Cost,
    Method,
    MiddleContext,
    Queries,
    Residual,
    RowIndices,
    RowSet,
    Selection,
    Selector,
    SelectorKernels,
    SelectorReport,
    single_rows,
)
from sparsekv.runtime.selection.registry import methods
from sparsekv.runtime.selection.token_choice import check_rerank, token_logits
from sparsekv.runtime.selection.wrappers import residual_clusters

PIECE = 32  # largest number of a question's tokens that share a selection


@methods.register("codes")
@dataclass(frozen=True)
class Codes(Method):
    """Ranks all keys, or the keys of the best clusters, by their codes.

    With `replace`, centroids represent the tokens that are not selected.
    """

    needs_index: ClassVar[bool] = True
    learns_queries: ClassVar[bool] = True
    estimates_missed: ClassVar[bool] = True
    default_budget: ClassVar[float] = 0.05
    rerank: float = field(
        default=1.0,
        metadata={"help": "Rank this many times the budget's keys by exact logits, and attend to the best; 1: off."},
    )
    scan: float = field(
        default=1.0, metadata={"help": "Share of the tokens whose codes are read: those of the best clusters; 1: all."}
    )
    replace: bool = field(
        default=True, metadata={"help": "Attend to centroids instead of the tokens that are not selected."}
    )

    def __post_init__(self) -> None:
        check_rerank(self.rerank)
        if not 0 < self.scan <= 1:
            raise UsageError(f"--scan {self.scan:g}: give a share above 0 and at most 1, such as 0.5")

    def replaces(self) -> bool:
        return self.replace

    def can_unite(self) -> bool:
        """Return True: the clusters can represent the tokens that none of the queries selects."""
        return True

    @classmethod
    def variants(cls, record: MethodRecord | None) -> dict[str, Self]:
        """Return the variant that attends to centroids of the tokens not selected, and the variant that does not."""
        return {"": cls(), "without replacement": cls(replace=False)}

    @classmethod
    def describe_clusters(cls, context: MiddleContext, values: torch.Tensor, biggest: int) -> Clustering:
        return describe_clusters(context.tensors, context.keys, values, context.first_token, biggest)

    def prepare(self, context: MiddleContext) -> "CodesSelector":
        """Create the selector of a layer. Allocates the codebooks in float32, and two int64 per token and head.

        With `scan` 1, the first step may also allocate a second copy of the codes. On a CPU this copy is in int32. On a
        GPU it has the kernels' layout, and each token's cluster is copied to int16 or int32. A selection without
        kernels allocates the logits of the scanned keys a few times. A selection with kernels allocates one byte per
        token, and one byte per token and query if several queries select separately.
        """
        return CodesSelector(context, self)


class CodesSelector(Selector):
    """Selects tokens by codes [Hk, M, m] uint8, in m subspaces; all query heads of a KV head share a selection."""

    question_piece = PIECE

    def __init__(self, context: MiddleContext, method: Codes):
        tensors = context.tensors
        self.facts, self.method = context.facts, method
        # Keys are loaded only for re-ranking, because the keys of an int8 index are dequantised and stay in memory.
        self.keys = context.keys if method.rerank > 1 else None
        self.estimates = CodeEstimates(tensors, context.facts)
        self.codes, self.order = tensors["codes"], tensors["token_order"].long()
        self.clusters, self.bias = residual_clusters(tensors), tensors["rest_bias"]
        self.values, self.starts = tensors["rest_values"], tensors["token_offsets"].long()[:, :-1]
        self.middle, self.counts = self.codes.shape[1], self.clusters.counts.long()
        self.log_masses = self.counts.float().log() + self.bias
        stored = sum(2 * tensors[name][0].numel() for name in ("query_turn", "codebooks"))  # bytes, in float16
        self.row_bytes = self.clusters.keys.shape[2] * self.clusters.keys.element_size()
        self.replace, self.stored_rows = method.replace, stored / self.row_bytes
        self.tensors = tensors
        self.has_gpu_scan = method.scan == 1 and CodeScan.serves(tensors)
        of_questions = method.scan == 1 and QuestionScan.serves(tensors)
        self.question_scan = QuestionScan(tensors, self.facts) if of_questions else None

    @cached_property
    def step_codes(self) -> StepCodes:
        """Inputs of the compiled CPU step, and the compiled step if there is one."""
        return StepCodes(
            turn=self.estimates.turn.contiguous(),
            books=self.estimates.codebooks.contiguous(),
            codes=self.codes,
            labels=self.clusters.labels.int(),
            centroids=self.clusters.keys,
            counts=self.clusters.counts,
            masses=self.log_masses,
            values=self.values,
            softmax_scale=self.facts.softmax_scale,
            softcap=self.facts.softcap,
        )

    @cached_property
    def gpu_scan(self) -> CodeScan:
        """Scan by GPU kernels, created when a step first uses it."""
        return CodeScan(self.tensors, self.clusters, self.facts)

    def replace_by_own(self) -> bool:
        self.replace = True
        return True

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select the tokens of highest estimated probability; with re-ranking, the best candidates by exact logits.

        Reads the centroids of all clusters, unless the budget is the whole middle. A decode step on a CPU that is
        neither measured nor prefetched calls `attend_fused` instead, if the compiled step supports the query.
        """
        tokens = budget.tokens(self.middle)
        if tokens == self.middle:
            return self._everything(1 if queries.joint else queries.query.shape[2])
        candidates = min(self.middle, math.ceil(tokens * self.method.rerank))
        if self.has_gpu_scan and queries.in_place is not None:
            return self._choose_on_gpu(self.gpu_scan, queries, queries.in_place.exact, tokens, candidates)
        scanned = min(self.middle, max(candidates, math.ceil(self.method.scan * self.middle)))
        chosen = self._choose_compiled(queries, tokens) if scanned == self.middle and candidates == tokens else None
        if chosen is not None:
            return self._selection(chosen, lambda: self._logits(queries.query, self.clusters.keys), scanned, 0)
        query, logits = queries.query, self._logits(queries.query, self.clusters.keys)
        total = self._total(logits, queries)
        if queries.joint and candidates == tokens and self.question_scan is not None:
            best = self.question_scan.choose(query, total, tokens)[:, None].long()
            return self._selection(best, lambda: logits, scanned, 0)
        if scanned == self.middle:
            scores = probability(self.estimates.of_all(query), total, joint=queries.joint)
            best = best_tokens(scores, candidates)
        else:
            found = self._members(probability(logits, total, joint=queries.joint), scanned)
            scores = probability(self.estimates.of(query, found), total, joint=queries.joint)
            best = found.gather(-1, best_tokens(scores, candidates))
        if self.keys is not None and candidates > tokens:
            exact = probability(token_logits(query, self.keys, best, self.facts), total, joint=queries.joint)
            best = best.gather(-1, best_tokens(exact, tokens))
        return self._selection(best, lambda: logits, scanned, candidates - tokens)

    @property
    def kernels(self) -> SelectorKernels:
        return SelectorKernels(self.attend_fused, choose_for_each=self.choose_for_each)

    def choose_for_each(self, queries: Queries, budget: Budget, counter: torch.Tensor) -> Selection | None:
        """Return the union of all queries' selections on a GPU.

        Returns None with re-ranking, for a budget of all tokens, or if the GPU kernels do not scan the keys.
        """
        tokens = budget.tokens(self.middle)
        if self.method.rerank > 1 or tokens == self.middle or not self.has_gpu_scan:
            return None
        joined, taken = self.gpu_scan.choose_for_each(queries.query, queries.exact_logsumexp(), tokens)
        counter += joined.used
        left = (self.clusters.counts - taken).float()[:, None]
        return Selection(
            RowSet(joined.rows[:, None], None, joined.rows.shape[1], 0, RowIndices(joined.rows, joined.used, None)),
            Cost(self._read(self.middle, 0), per_count=2),
            Residual(lambda: (self._centroids_left(left),), attended=self.replace),
        )

    def attend_fused(
        self, query: torch.Tensor, rows: Pair, exact: Pair, budget: Budget, sink_logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, float] | None:
        """Select and attend with the compiled step.

        Returns None if only some keys are scanned, if candidates must be re-ranked, or if the compiled step does not
        exist or does not support the query.
        """
        tokens = budget.tokens(self.middle)
        if self.method.scan < 1 or (self.method.rerank > 1 and tokens < self.middle) or not self._is_compiled(query):
            return None
        replace, sinks = self.replace, sink_logits
        output = attend_by_codes(query, self.step_codes, rows, exact, tokens, replace=replace, sink_logits=sinks)
        return output, 2.0 * tokens + (self._read(self.middle, 0) if tokens < self.middle else 0.0)

    def _is_compiled(self, query: torch.Tensor) -> bool:
        """Whether the compiled step supports a query. Without numba there is no compiled step."""
        return query.dtype == torch.float32 and not query.is_cuda and self.step_codes.compiled is not None

    def _total(self, logits: torch.Tensor, queries: Queries) -> torch.Tensor:
        """Compute the log-sum-exp [Hk, G, Q] of each query's logits on all rows.

        The part of the middle is estimated from the clusters' logits [Hk, G, Q, C]. The part of the rows that are
        always attended to is exact.
        """
        return torch.logaddexp((logits + self.log_masses[:, None, None]).logsumexp(-1), queries.exact_logsumexp())

    def _choose_compiled(self, queries: Queries, tokens: int) -> torch.Tensor | None:
        """Select tokens [Hk, Q, K] for each query with the compiled step; None if it does not support these queries.

        The step processes one query after another, each on all cores. Torch's look-ups for several queries would take
        many times as long.
        """
        Hk, _, Q, _ = queries.query.shape
        if (queries.joint and Q > 1) or Hk != len(self.codes) or not self._is_compiled(queries.query):
            return None
        pairs = zip(queries.query.unbind(2), queries.exact_logsumexp().unbind(2), strict=True)
        return torch.stack([choose_by_codes(query, self.step_codes, beside, tokens) for query, beside in pairs], 1)

    def _selection(
        self, chosen: torch.Tensor, logits: Callable[[], torch.Tensor], scanned: int, more: int
    ) -> Selection:
        """Build the selection of tokens [Hk, Q or 1, K], for which `scanned` codes and `more` keys were read."""
        rest = Residual(lambda: self._rest(chosen, logits()), attended=self.replace)
        return Selection(single_rows(chosen), Cost(self._read(scanned, more)), rest)

    def _everything(self, queries: int) -> Selection:
        """Select all tokens, without reading the index."""
        rows = torch.arange(self.middle, device=self.codes.device).expand(len(self.codes), queries, -1)
        return Selection(single_rows(rows), Cost(0.0), Residual(lambda: self._rest(rows), attended=self.replace))

    def _choose_on_gpu(
        self, scan: CodeScan, queries: Queries, exact: ExactKeys, tokens: int, candidates: int
    ) -> Selection:
        chosen, left = scan.choose(queries.query[:, :, 0], exact, self.keys, tokens, candidates)
        rows, scored = chosen[:, None], (left,) if self.replace else None
        return Selection(
            single_rows(rows),
            Cost(self._read(self.middle, candidates - tokens)),
            Residual(lambda: self._rest(rows.long()), attended=self.replace, in_place=scored),
        )

    def _read(self, scanned: int, more: int) -> float:
        """Return the number of D-sized rows per head that a selection reads from the index, plus `more` keys."""
        clusters = (2 if self.replace else 1) * self.counts.shape[1]
        return self.stored_rows + clusters + scanned * self.codes.shape[2] / self.row_bytes + more

    def _logits(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return attention_logits(query, keys, *self.facts.scaling)

    def _members(self, scores: torch.Tensor, wanted: int) -> torch.Tensor:
        """Return the first `wanted` tokens [Hk, Q or 1, wanted] of all clusters, in descending order of cluster score.

        `scores` [Hk, Q or 1, C] has the scores of the clusters.
        """
        order = scores.argsort(-1, descending=True)
        of_each = [one[:, None].expand_as(order).gather(-1, order) for one in (self.starts, self.counts)]
        rows, _ = expand_runs(of_each[0], fill_budget(of_each[1], wanted), wanted)
        return self.order[:, None].expand(-1, rows.shape[1], -1).gather(-1, rows)

    @property
    def report(self) -> SelectorReport:
        return SelectorReport(centroid_of=lambda rest: self.clusters.labels)

    def rest_of(self, chosen: torch.Tensor) -> Residual:
        left = self.clusters.left(self.clusters.labels[:, None], chosen[:, None])
        return Residual(lambda: (self._centroids_left(left),), attended=True)

    def _rest(self, chosen: torch.Tensor, logits: torch.Tensor | None = None) -> tuple[CentroidSegment, ...]:
        """Return the centroids of all tokens except the selected tokens [Hk, Q or 1, K].

        The centroids get the clusters' logits [Hk, G, Q, C], if logits are passed and there is one query.
        """
        labels = self.clusters.labels[:, None].expand(-1, chosen.shape[1], -1)
        part = self._centroids_left(self.clusters.left(labels.gather(-1, chosen)))
        if logits is not None and logits.shape[2] == 1:
            part = replace(part, scored=ScoredCentroids(logits[:, :, 0], part.log_counts[:, 0], part.values))
        return (part,)

    def _centroids_left(self, left: torch.Tensor) -> CentroidSegment:
        """Return the centroids, which represent `left` [Hk, Q or 1, C] tokens of their clusters."""
        return CentroidSegment(self.clusters.keys, left.log() + self.bias[:, None], self.values)
