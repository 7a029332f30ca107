"""Decoding with the method `codes`: tokens are selected by product-quantisation codes of keys.

The codes of all keys are scanned, or only the codes of the keys in the best clusters. With `replace`, the clusters'
centroids, with fitted masses and values, represent the tokens that are not selected. One softmax covers selected tokens
and centroids. `CodeEstimates` runs on any device, `CodeScan` and `QuestionScan` only on a GPU. On a CPU
`kernels.attention.cpu_steps` calls the compiled step, `kernels.attention.code_step_numba`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch.nn.functional import embedding_bag

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.context_rows import Pair
from sparsekv.formats.index.schema import LayerFacts, MethodRecord
from sparsekv.kernels.attention.cpu_steps import StepCodes, attend_by_codes, choose_by_codes
from sparsekv.kernels.codes.code_ranks import (
    CENTROIDS,
    IN_WORD,
    CodeChoice,
    JoinedKeys,
    KeyCodes,
    LaidOutCodes,
    WeighedClusters,
    as_stored,
    best_by_codes,
    join_chosen,
    lay_out_codes,
    rank_codes,
    rank_jointly,
    spans_of,
)
from sparsekv.kernels.common.kernel_inputs import ScoredCentroids, TakenRows
from sparsekv.kernels.common.launch import power_of_two
from sparsekv.kernels.common.row_operations import expand_runs, fill_budget
from sparsekv.kernels.posting_lists.list_ranks import ExactKeys, KeyGroups, rank_rows, top_ranked
from sparsekv.kernels.scores.logits import attention_logits, best_tokens, softcapped
from sparsekv.runtime.selection.cluster_statistics import Clustering, describe_clusters
from sparsekv.runtime.selection.interface import (
    Budget,
    CentroidSegment,
    Cost,
    InPlace,
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
    methods,
    single_rows,
)
from sparsekv.runtime.selection.token_choice import check_rerank, rerank_scores, token_logits
from sparsekv.runtime.selection.wrappers import ResidualClusters, residual_clusters

LARGEST_EXPONENT = 60.0  # upper bound of a logit minus its log-sum-exp: sums of exponentials stay within float32


class CodeEstimates:
    """Estimates logits from one layer's codes [Hk, M, m] uint8, which have one index for each of m parts of a key.

    The codes are indices into the codebooks [Hk, m, C, D / m] float32, of C centroids each. `turn` [Hk, D, D] float32
    rotates queries to the space of the codebooks.

    Args:
        tensors: tensors of the index; see `CodesIndexer.build_layer`.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], facts: LayerFacts):
        self.turn, self.codebooks = tensors["query_turn"].float(), tensors["codebooks"].float()
        self.codes, self.facts = tensors["codes"], facts

    def of(self, query: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Estimate logits [Hk, G, Q, S] float32 of queries [Hk, G, Q, D] on tokens [Hk, Q or 1, S]."""
        codes = self.codes.gather(1, tokens.flatten(1)[..., None].expand(-1, -1, self.codes.shape[2]))
        codes = codes.view(*tokens.shape, -1)[:, None]
        logits = torch.zeros(*query.shape[:3], tokens.shape[-1], device=query.device)
        for part, table in enumerate(self._tables(query).unbind(3)):
            logits += table.gather(-1, codes[..., part].long().expand_as(logits))
        return self._capped(logits)

    def of_all(self, query: torch.Tensor) -> torch.Tensor:
        """Estimate logits [Hk, G, Q, M] of queries on all tokens; on a CPU, torch's `embedding_bag` sums table rows."""
        Hk, G, Q, _ = query.shape
        if query.is_cuda:
            return self.of(query, torch.arange(self.codes.shape[1], device=query.device).expand(Hk, 1, -1))
        rows = self._tables(query).permute(0, 3, 4, 1, 2).reshape(-1, G * Q)
        sums = embedding_bag(self.places, rows, mode="sum").view(Hk, -1, G, Q)
        return self._capped(sums.permute(0, 2, 3, 1))

    @cached_property
    def places(self) -> torch.Tensor:
        """Row of each code in the concatenated tables of all heads and parts, [Hk * M, m] int32."""
        (Hk, _, m), C = self.codes.shape, self.codebooks.shape[2]
        tables = C * torch.arange(Hk * m, dtype=torch.int32).view(Hk, 1, m)
        return (self.codes + tables).flatten(0, 1)

    def _tables(self, query: torch.Tensor) -> torch.Tensor:
        """Compute look-up tables: products [Hk, G, Q, m, C] of each part of the rotated queries with C centroids."""
        rotated = torch.einsum("hgqd,hde->hgqe", query.float(), self.turn)
        parts = rotated.unflatten(-1, (self.codebooks.shape[1], -1))
        return torch.einsum("hgqpd,hpcd->hgqpc", parts, self.codebooks)

    def _capped(self, products: torch.Tensor) -> torch.Tensor:
        return softcapped(products * self.facts.softmax_scale, self.facts.softcap)


def probability(logits: torch.Tensor, total: torch.Tensor, *, joint: bool) -> torch.Tensor:
    """Compute probabilities [Hk, Q, S] from logits [Hk, G, Q, S] on S tokens, as the mean over the G query heads.

    Args:
        total: [Hk, G, Q], the log-sum-exp of the logits on all rows and centroids to which a query attends.
        joint: compute the mean over the queries, too: [Hk, 1, S].
    """
    # `total` is an estimate, and so a logit may exceed it.
    probability = (logits - total[..., None]).clamp(max=LARGEST_EXPONENT).exp().mean(1)
    return probability.mean(1, keepdim=True) if joint else probability


MOST_PARTS, MOST_CHANNELS = 64, 64  # largest number of parts, and of channels of a part, that kernels support
MOST_SHORT = 2**15  # largest number of clusters whose indices fit int16
# Fewest keys for which kernels are used. With fewer keys the kernels would be slower than dense attention. Then
# torch is used, which does not round scores.
FEWEST_KEYS = 2**10


class CodeScan:
    """Scan of one layer's codes on a GPU, with a second copy of the codes in the kernel's layout.

    Args:
        tensors: tensors of the index; see `CodesIndexer.build_layer`.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], clusters: ResidualClusters, facts: LayerFacts):
        codes, self.facts = tensors["codes"], facts
        turn, books = tensors["query_turn"].contiguous(), tensors["codebooks"].contiguous()
        self.codes = LaidOutCodes(turn, books, lay_out_codes(codes), codes.shape[1], spans_of(books))
        counts, bias = clusters.counts.int().contiguous(), tensors["rest_bias"].float().contiguous()
        self.clusters = WeighedClusters(clusters.keys.contiguous(), counts, bias)
        # Each step reads the labels of all keys, and so labels are stored in few bytes.
        short = torch.int16 if counts.shape[1] <= MOST_SHORT else torch.int32
        self.values, self.labels = tensors["rest_values"], clusters.labels.to(short).contiguous()

    @staticmethod
    def fits(tensors: dict[str, torch.Tensor]) -> bool:
        """Whether kernels support the sizes of the codebooks."""
        _, parts, centroids, size = tensors["codebooks"].shape
        # The kernel unrolls its look-ups over the parts, and stores one part of the rotation in shared memory.
        return parts % IN_WORD == 0 and parts <= MOST_PARTS and size <= MOST_CHANNELS and centroids == CENTROIDS

    @staticmethod
    def serves(tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the codes are on a GPU, in sizes that kernels support, and of at least FEWEST_KEYS keys."""
        return tensors["codes"].is_cuda and CodeScan.fits(tensors) and tensors["codes"].shape[1] >= FEWEST_KEYS

    def choose_for_each(
        self, query: torch.Tensor, beside: torch.Tensor, tokens: int
    ) -> tuple[JoinedKeys, torch.Tensor]:
        """Select the union of the best tokens of T queries; also count each cluster's selected tokens, [Hk, C] int32.

        Args:
            query: [Hk, G, T, D].
            beside: [Hk, G, T], log-sum-exp of each query's logits on sinks, tail and new tokens (the exact rows).
            tokens: number of tokens of each query's selection.
        """
        Hk, G, T, D = query.shape
        each, nothing = query.transpose(1, 2).reshape(Hk * T, G, D), query.new_empty(Hk, 0, D)
        exact = ExactKeys(nothing, sinks=beside.transpose(1, 2).reshape(Hk * T, G))
        found = rank_codes(each, self.codes, self.clusters, exact, tokens, *self.facts.scaling)
        chosen = top_ranked(found.ranks, tokens).view(Hk, T, tokens)
        taken = torch.zeros_like(self.clusters.counts)
        return join_chosen(chosen, min(self.codes.keys, T * tokens), KeyGroups(self.labels, taken)), taken

    def choose(
        self,
        query: torch.Tensor,
        exact: ExactKeys,
        rows: Pair | None,
        keys: torch.Tensor | None,
        tokens: int,
        candidates: int,
    ) -> tuple[torch.Tensor, ScoredCentroids]:
        """Select the best K tokens for one query, and centroids for all other tokens.

        Returns the tokens [Hk, K] int32, in order of position, and the centroids with their logits.

        Args:
            query: [Hk, G, D].
            exact: the keys that are always attended to, for the softmax denominator.
            rows: float keys and values [Hk, M or more, D] that the query will attend to in place; None: they are int8.
            keys: keys [Hk, M, D] for re-ranking candidates by exact logits; None: no re-ranking.
            tokens: number of tokens K to select.
            candidates: number of tokens to re-rank, at least K.
        """
        scaling = self.facts.scaling
        if keys is None or candidates == tokens:
            best = best_by_codes(query, self.codes, self.clusters, exact, tokens, self.labels, rows, *scaling)
        else:
            found = rank_codes(query, self.codes, self.clusters, exact, candidates, *scaling)
            listed = top_ranked(found.ranks, candidates)
            ranks = rank_rows(query, keys, listed, found.ranks.logsumexp, tokens, *scaling)
            chosen = top_ranked(ranks, tokens, listed, KeyGroups(self.labels, found.taken))
            best = CodeChoice(chosen, found.logits, found.taken, ahead=False)
        clusters, bias = TakenRows(self.clusters.counts, best.taken), self.clusters.bias
        left = ScoredCentroids(best.logits, bias, self.values, clusters=clusters, ahead=best.ahead)
        return best.chosen, left


class QuestionScan:
    """Scan of one layer's codes for all tokens of a question together, without a copy of the stored codes.

    Args:
        tensors: tensors of the index; see `CodesIndexer.build_layer`.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], facts: LayerFacts):
        turn, books, codes = (tensors[name].contiguous() for name in ("query_turn", "codebooks", "codes"))
        self.codes, self.facts = KeyCodes(turn, books, as_stored(codes), codes.shape[1]), facts

    @staticmethod
    def fits(tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the kernel supports the sizes of the codebooks."""
        # A tile of the kernel has the channels of all parts. Its sizes must be powers of two, and its matrix product
        # needs at least 16 channels.
        _, parts, _, size = tensors["codebooks"].shape
        powers = all(power_of_two(number) == number for number in (parts, size)) and parts * size >= 16
        return CodeScan.fits(tensors) and powers

    @staticmethod
    def serves(tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the codes are on a GPU, in sizes that the kernel supports, and of at least FEWEST_KEYS keys."""
        return CodeScan.serves(tensors) and QuestionScan.fits(tensors)

    def choose(self, query: torch.Tensor, totals: torch.Tensor, tokens: int) -> torch.Tensor:
        """Select the best tokens [Hk, K] int32 for queries [Hk, G, T, D] together, in order of position.

        `totals` [Hk, G, T] are the log-sum-exps of each query's logits on all rows and centroids that it attends to.
        """
        ranks = rank_jointly(query.flatten(1, 2), totals.flatten(1), self.codes, tokens, *self.facts.scaling)
        return top_ranked(ranks, tokens)


PIECE = 32  # largest number of a question's tokens that share a selection
ENOUGH = 480  # default budget, in tokens, if 9,600 to 32,000 tokens are between sinks and tail


@methods.register("codes")
@dataclass(frozen=True)
class Codes(Method):
    """Ranks all keys, or the keys of the best clusters, by their codes.

    With `replace`, centroids represent the tokens that are not selected.
    """

    needs_index: ClassVar[bool] = True
    learns_queries: ClassVar[bool] = True
    estimates_missed: ClassVar[bool] = True
    rerank: float = field(
        default=1.0,
        metadata={"help": "Rank this many times the budget's keys by exact logits, and attend to the best; 1: off."},
    )
    scan: float = field(
        default=1.0, metadata={"help": "Share of the tokens whose codes are read, best clusters first; 1: all tokens."}
    )
    replace: bool = field(
        default=True, metadata={"help": "Attend to centroids instead of the tokens that are not selected."}
    )

    @classmethod
    def default_budget(cls, middle: int) -> Budget:
        """Return 5% of up to 9,600 tokens between sinks and tail, `ENOUGH` of up to 32,000, and 1.5% of more."""
        short, long = Budget(0.05), Budget(0.015)
        if long.tokens(middle) >= ENOUGH:
            return long
        return short if short.tokens(middle) <= ENOUGH else Budget(ENOUGH)

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

        On a CPU with `scan` 1, loads the compiled step and allocates each token's cluster in int32. The first call on a
        machine compiles the step, which takes seconds. Without a compiled step, the first selection allocates a second
        copy of the codes in int32. On a GPU with `scan` 1, the first step may allocate a copy of the codes in the
        kernels' layout, and of each token's cluster in int16 or int32. A selection without kernels allocates the logits
        of the scanned keys a few times. A selection with kernels allocates one byte per token, and one byte per token
        and query if several queries select separately.
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
        # Loading the compiled step takes as long as several decode steps. It is loaded here, so that no step waits.
        in_float32 = self.codes.is_cpu and self.clusters.keys.dtype == torch.float32
        self.is_compiled = method.scan == 1 and in_float32 and self.step_codes.compiled is not None

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

        Reads the centroids of all clusters, unless the budget is all tokens between sinks and tail. A decode step on a
        CPU that is neither measured nor prefetched calls `attend_fused` instead, if the compiled step supports the
        query.
        """
        tokens = budget.tokens(self.middle)
        if tokens == self.middle:
            return self._everything(1 if queries.joint else queries.query.shape[2])
        candidates = min(self.middle, math.ceil(tokens * self.method.rerank))
        if self.has_gpu_scan and queries.in_place is not None:
            return self._choose_on_gpu(queries.query[:, :, 0], queries.in_place, tokens, candidates)
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
            exact = token_logits(query, self.keys, best, self.facts)
            best = best.gather(-1, best_tokens(rerank_scores(exact, total, joint=queries.joint), tokens))
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
        if (self.method.rerank > 1 and tokens < self.middle) or not self._supports(query):
            return None
        replace, sinks = self.replace, sink_logits
        output = attend_by_codes(query, self.step_codes, rows, exact, tokens, replace=replace, sink_logits=sinks)
        return output, 2.0 * tokens + (self._read(self.middle, 0) if tokens < self.middle else 0.0)

    def _supports(self, query: torch.Tensor) -> bool:
        """Whether there is a compiled step, and it supports a query."""
        return self.is_compiled and query.dtype == torch.float32 and not query.is_cuda

    def _total(self, logits: torch.Tensor, queries: Queries) -> torch.Tensor:
        """Compute the log-sum-exp [Hk, G, Q] of each query's logits on all rows.

        The part of the rows between sinks and tail is estimated from the clusters' logits [Hk, G, Q, C]. The part of
        the rows that are always attended to is exact.
        """
        return torch.logaddexp((logits + self.log_masses[:, None, None]).logsumexp(-1), queries.exact_logsumexp())

    def _choose_compiled(self, queries: Queries, tokens: int) -> torch.Tensor | None:
        """Select tokens [Hk, Q, K] for each query with the compiled step; None if it does not support these queries.

        The step processes one query after another, each on all cores. Torch's look-ups for several queries would take
        many times as long.
        """
        Hk, _, Q, _ = queries.query.shape
        if (queries.joint and Q > 1) or Hk != len(self.codes) or not self._supports(queries.query):
            return None
        pairs = zip(queries.query.unbind(2), queries.exact_logsumexp().unbind(2), strict=True)
        return torch.stack([choose_by_codes(query, self.step_codes, beside, tokens) for query, beside in pairs], 1)

    def _selection(
        self, chosen: torch.Tensor, logits: Callable[[], torch.Tensor], scanned: int, keys: int
    ) -> Selection:
        """Build the selection of tokens [Hk, Q or 1, K], after reading the codes of `scanned` tokens and `keys` keys.

        `logits` returns the clusters' logits.
        """
        rest = Residual(lambda: self._rest(chosen, logits()), attended=self.replace)
        unshared = keys + (self._code_rows(scanned) if scanned < self.middle else 0.0)
        return Selection(single_rows(chosen), Cost(self._read(scanned, keys), unshared=unshared), rest)

    def _everything(self, queries: int) -> Selection:
        """Select all tokens, without reading the index."""
        rows = torch.arange(self.middle, device=self.codes.device).expand(len(self.codes), queries, -1)
        return Selection(single_rows(rows), Cost(0.0), Residual(lambda: self._rest(rows), attended=self.replace))

    def _choose_on_gpu(self, query: torch.Tensor, given: InPlace, tokens: int, candidates: int) -> Selection:
        chosen, left = self.gpu_scan.choose(query, given.exact, given.rows, self.keys, tokens, candidates)
        rows, scored, more = chosen[:, None], (left,) if self.replace else None, candidates - tokens
        return Selection(
            single_rows(rows),
            Cost(self._read(self.middle, more), unshared=more),
            Residual(lambda: self._rest(rows.long()), attended=self.replace, in_place=scored),
        )

    def _read(self, scanned: int, keys: int) -> float:
        """Return the number of D-sized rows per head that a selection reads: from the index, and `keys` keys.

        From the index it reads the rotation, codebooks, clusters, and the codes of `scanned` tokens.
        """
        clusters = (2 if self.replace else 1) * self.counts.shape[1]
        return self.stored_rows + clusters + self._code_rows(scanned) + keys

    def _code_rows(self, scanned: int) -> float:
        """Return the size of the codes of `scanned` tokens, in D-sized rows."""
        return scanned * self.codes.shape[2] / self.row_bytes

    def _logits(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return attention_logits(query, keys, *self.facts.scaling)

    def _members(self, scores: torch.Tensor, number: int) -> torch.Tensor:
        """Return the first `number` tokens [Hk, Q or 1, number] of all clusters, in descending order of cluster score.

        `scores` [Hk, Q or 1, C] has the scores of the clusters.
        """
        order = scores.argsort(-1, descending=True)
        of_each = [one[:, None].expand_as(order).gather(-1, order) for one in (self.starts, self.counts)]
        rows, _ = expand_runs(of_each[0], fill_budget(of_each[1], number), number)
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
