"""Decoding with CSAttention: keys are selected through posting lists, one for each centroid of the prompt's queries.

In each subspace, the query reads the posting list of its nearest centroid. The listed scores, summed for each key,
estimate the logits, and the best keys are attended to.

There are three differences from the paper by default. In the paper, a key that is not in a list scores 0 in the list's
subspace, which is more than a listed key with a negative score. Here it gets the mean score of all keys that are not
in the list. Each subspace's scores are multiplied by the query's projection on the centroid. The keys of more
candidates than the budget are read, and re-ranked by exact logits.

A schedule can search once in several steps, and streaming inserts new keys into the lists.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch

from sparsekv.formats.errors import UsageError, check_at_least_one, check_choice
from sparsekv.formats.index.schema import LayerFacts, MethodRecord
from sparsekv.kernels.posting_lists.list_ranks import ExactKeys, rank_rows, rank_tokens, top_ranked
from sparsekv.kernels.posting_lists.posting_lists import (
    SCORINGS,
    Tables,
    centroids_used,
    cosine_kmeans,
    encode_lists,
    estimate_logits,
    estimate_part,
    insert,
    look_up,
    split_channels,
    top_lists,
)
from sparsekv.kernels.scores.logits import best_tokens, softcapped, softmax_with_logsumexp
from sparsekv.runtime.cache.buffers import GrowingRows
from sparsekv.runtime.selection.cluster_statistics import ListShape, describe_lists
from sparsekv.runtime.selection.interface import (
    Appended,
    Appending,
    Budget,
    ConversationState,
    Cost,
    Method,
    MiddleContext,
    Queries,
    Selection,
    Selector,
    SelectorReport,
    methods,
    single_rows,
)
from sparsekv.runtime.selection.token_choice import check_rerank, rerank_scores, token_logits

FEWEST_KEYS = 2**10  # fewest keys for which kernels are used; with fewer, torch reads the lists, and rounds no scores


class ListSearch:
    """Search by GPU kernels in one layer's posting lists, which are laid out by token.

    Each list has a four-bit code for each of the M keys.

    Args:
        tables: the posting lists to encode, and their centroids.
        scoring, weights: see `estimate_part` and `look_up`.
    """

    def __init__(self, tables: Tables, scoring: str, weights: torch.Tensor | None, facts: LayerFacts):
        self.lists, self.facts = encode_lists(tables, scoring, weights), facts

    def select(
        self, query: torch.Tensor, exact: ExactKeys, keys: torch.Tensor, tokens: int, rerank: float = 1.0
    ) -> Selection:
        """Select the best tokens for one query, in order of position.

        The cost counts a list once for each query head that reads it.

        Args:
            query: [Hk, G, D].
            exact: the keys that are always attended to, for the softmax denominator.
            keys: keys [Hk, M, D] of the tokens between sinks and tail.
            tokens: number of tokens to select.
            rerank: number of candidates per selected token, which are re-ranked by exact logits; 1: no re-ranking.
        """
        candidates = min(self.lists.keys, math.ceil(tokens * rerank))
        ranked = rank_tokens(query, self.lists, exact, candidates, *self.facts.scaling)
        chosen, more = top_ranked(ranked, candidates), candidates - tokens
        if more:
            ranked = rank_rows(query, keys, chosen, ranked.logsumexp, tokens, *self.facts.scaling)
            chosen = top_ranked(ranked, tokens, chosen)
        read = query.shape[1] * self.lists.codes[0, :, 0].nbytes + self.lists.centroids[0].nbytes
        return Selection(single_rows(chosen[:, None]), Cost(read / (keys.shape[2] * keys.element_size()) + more))


ENTRY_BYTES = 6  # bytes of a listed key: its position in int32 and its score in float16
CENTROID_BYTES = 2  # bytes of a centroid per channel, in float16
NEW_CENTROIDS, NEW_ITERATIONS = 8, 5  # centroids and iterations of k-means over the queries since the last append
LOGITS_AT_ONCE = 2**25  # elements of [Hk, R, M] float32 estimates: 128 MB


@dataclass(frozen=True)
class _Piece:
    """Some queries [Hk, G, Q, D] of a search, as many as are estimated at a time.

    `beside` [Hk, G, Q] is the log-sum-exp of the queries' logits on the rows that are always attended to. `shared` is
    True if the queries share one selection.
    """

    query: torch.Tensor
    beside: torch.Tensor
    shared: bool


@dataclass
class _Held:
    """Selection of the last search, and the number of decode steps that have used this selection."""

    selection: Selection
    steps: int = 1


class TableSelector(Selector):
    """Selects single tokens of one layer by posting lists, in order of position.

    Args:
        scoring: see `estimate_part`.
        rerank: number of candidates per token of the budget, which are re-ranked by exact logits; 1: no re-ranking.
        fitted: weight the subspaces by the index's fitted weights.
        backoff: cosine to the nearest centroid below which a query reads two lists in a subspace; None: always one
            list.
        step: search every `step` decode steps, and reuse the selection in between.
        append_size: number of new tokens that are inserted into the lists at a time; 0: none are inserted.
    """

    def __init__(
        self,
        context: MiddleContext,
        *,
        scoring: str = "mean",
        rerank: float = 1.0,
        fitted: bool = False,
        backoff: float | None = None,
        step: int = 1,
        append_size: int = 0,
    ):
        self.facts, self.scoring, self.rerank, self.backoff = context.facts, scoring, rerank, backoff
        self.step, self.append_size = step, append_size
        self.weights = context.tensors["part_weights"] if fitted else None
        middle, self.row_bytes = context.keys.shape[1], context.keys.shape[2] * context.keys.element_size()
        self.stored = self.tables = Tables.from_tensors(context.tensors, middle, context.first_token)
        self.stored_keys, self.keys = context.keys, GrowingRows(context.keys)
        self.open_row, self.held = middle, dict[Budget, _Held]()
        self.recent: list[torch.Tensor] = []
        # The layout by token cannot grow and supports one list for each part of a query. Therefore appending and
        # backoff exclude it.
        reached = self.tables.tokens.is_cuda and backoff is None and not append_size and middle >= FEWEST_KEYS
        self.by_token = ListSearch(self.tables, scoring, self.weights, self.facts) if reached else None

    @property
    def conversation(self) -> ConversationState | None:
        """State of the search schedule: the selection that the steps after a search reuse. None if every step
        searches."""
        return None if self.step == 1 else ConversationState(self.held.clear)

    @property
    def append(self) -> Appending | None:
        if not self.append_size:
            return None
        return Appending(self.append_size, lambda: self.open_row, self.append_tokens, self.remove_appended)

    def graph_state(self) -> int | None:
        """Return None with a search schedule, because some steps search and others reuse a selection."""
        return 0 if self.step == 1 else None

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select tokens, or reuse the last search's selection. If tokens are appended, keep the queries for the append.

        Allocates a few copies of the estimated logits of as many queries as 128 MB hold, but of at least one query.
        """
        if self.append_size and not any(queries.query is query for query in self.recent[-1:]):
            self.recent.append(queries.query)
        if queries.joint or self.step == 1:
            return self._search(queries, budget)
        if queries.query.shape[2] > 1:
            return self._search_some(queries, budget)
        held = self.held.get(budget)
        if held is not None and held.steps >= self.step:
            # A guard also selects at raised budgets, in some steps only. These selections are dropped together with the
            # selection at the first budget.
            self.held.clear()
            held = None
        if held is None:
            held = self.held[budget] = _Held(self._search(queries, budget))
            return held.selection
        held.steps += 1
        return replace(held.selection, cost=Cost(0.0))

    def _search_some(self, queries: Queries, budget: Budget) -> Selection:
        """Select for Q consecutive decode steps: each `step`-th step, from the first on, searches for `step` steps."""
        query, Q = queries.query, queries.query.shape[2]
        found = self._search(queries.of_tokens(slice(None, None, self.step)), budget)
        index_rows = torch.zeros(len(query), Q, device=query.device)
        index_rows[:, :: self.step] = found.cost.index_rows
        rows = found.rows.starts.repeat_interleave(self.step, 1)[:, :Q]
        return Selection(single_rows(rows), Cost(index_rows))

    def _search(self, queries: Queries, budget: Budget) -> Selection:
        query, tokens = queries.query, budget.tokens(self.tables.keys)
        if self.by_token is not None and queries.in_place is not None:
            return self.by_token.select(query[:, :, 0], queries.in_place.exact, self.keys.rows, tokens, self.rerank)
        at_once = max(1, LOGITS_AT_ONCE // (query.shape[0] * query.shape[1] * self.tables.keys))
        split = zip(query.split(at_once, 2), queries.exact_logsumexp().split(at_once, 2), strict=True)
        pieces = [_Piece(some, beside, queries.joint) for some, beside in split]
        found = [self._choose(some, tokens) for some in ([pieces] if queries.joint else [[one] for one in pieces])]
        starts, rows = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        more = self._candidates(tokens) - tokens
        return Selection(single_rows(starts), Cost(rows, shared=self._centroid_rows, unshared=more))

    def _choose(self, pieces: list["_Piece"], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Select rows [Hk, Q or 1, K], ascending: for each query of one piece, or one selection for all pieces.

        Also returns the number of D-sized rows read [Hk, Q or 1].
        """
        estimated = [self._estimate(piece) for piece in pieces]
        probability, lists = (torch.stack(parts).sum(0) for parts in zip(*(one[:2] for one in estimated), strict=True))
        candidates = _best(probability, self._candidates(tokens))
        more = candidates.shape[-1] - tokens
        if more:
            totals = [one[2] for one in estimated]
            exact = [self._exact(piece, total, candidates) for piece, total in zip(pieces, totals, strict=True)]
            candidates = candidates.gather(-1, _best(torch.stack(exact).logsumexp(0), tokens))
        return candidates, self._rows(lists) + more

    def _candidates(self, tokens: int) -> int:
        """Return the number of candidates that a search for `tokens` tokens re-ranks by exact logits."""
        return min(self.tables.keys, math.ceil(tokens * self.rerank))

    def _estimate(self, piece: "_Piece") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Estimate probabilities [Hk, Q or 1, M] of M tokens, summed over the query heads of a KV head.

        If the queries share a selection, the probabilities are summed over the queries, too. Also returns the number of
        lists read [Hk, Q or 1], and the log-sum-exps [Hk, G, Q] of the softmax, which includes the rows that are always
        attended to.
        """
        Hk, G, Q, D = piece.query.shape
        lookup = look_up(self.tables, piece.query.transpose(1, 2).reshape(Hk, Q * G, D), self.backoff, self.weights)
        estimates = estimate_logits(self.tables, lookup, self.scoring) * self.facts.softmax_scale
        logits = softcapped(estimates, self.facts.softcap)
        beside = piece.beside.transpose(1, 2).flatten(1)
        weights, totals = softmax_with_logsumexp(torch.cat([logits, beside[..., None]], -1))
        together = Q * G if piece.shared else G
        probability = weights[..., :-1].unflatten(1, (-1, together)).sum(2)
        lists = centroids_used(self.tables, lookup, together)
        return probability, lists, totals.unflatten(1, (Q, G)).transpose(1, 2)

    def _exact(self, piece: "_Piece", totals: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Compute the `rerank_scores` [Hk, Q or 1, S] of candidates from exact logits.

        Args:
            totals: [Hk, G, Q], the estimated log-sum-exps that `_estimate` returns.
        """
        logits = token_logits(piece.query, self.keys.rows, candidates, self.facts)
        return rerank_scores(logits, totals, joint=piece.shared)

    @property
    def _centroid_rows(self) -> float:
        """Number of D-sized rows of all centroids, which every search reads."""
        return self.tables.centroids[0].numel() * CENTROID_BYTES / self.row_bytes

    def _rows(self, lists: torch.Tensor) -> torch.Tensor:
        """Return the number of D-sized rows that a search reads: all centroids, and `lists` [Hk, Q or 1] lists."""
        return lists * (self.tables.tokens.shape[-1] * ENTRY_BYTES / self.row_bytes) + self._centroid_rows

    @property
    def report(self) -> SelectorReport:
        return SelectorReport(covered=self.covered)

    def covered(self, queries: Queries) -> torch.Tensor:
        """Mark the tokens in the posting lists that the query heads of a group read: [Hk, Q, M] bool."""
        Hk, G, Q, D = queries.query.shape
        lookup = look_up(self.tables, queries.query.transpose(1, 2).reshape(Hk, Q * G, D), self.backoff, self.weights)
        named = torch.zeros(Hk, Q * G, self.tables.keys, dtype=torch.bool, device=queries.query.device)
        for part in range(lookup.nearest.shape[1]):
            for place in range(lookup.nearest.shape[3]):
                tokens = estimate_part(self.tables, lookup, part, place, self.scoring).tokens
                named.scatter_(-1, tokens, named.gather(-1, tokens) | lookup.reads[:, part, :, place, None])
        by_group: torch.Tensor = named.unflatten(1, (Q, G)).any(2)
        return by_group

    def append_tokens(self, keys: torch.Tensor, values: torch.Tensor) -> Appended:
        """Insert new keys into the lists whose lowest score they exceed, and add lists for new queries.

        New queries are those since the last append, if there are any. Without new lists, queries at new positions would
        match only centroids of older queries. In a measurement on a real document without new lists, recall fell by a
        sixth within a thousand generated tokens. Reads all lists and, if it adds lists, all keys. Allocates new tables.
        """
        old, new = self.tables, keys.shape[1]
        parts = split_channels(keys, old.channels)
        scores = (old.centroids @ parts.transpose(-1, -2)).half()
        positions = old.first_token + torch.arange(old.keys, old.keys + new, device=keys.device)
        subspaces = zip(*(rows.flatten(0, 1) for rows in (old.tokens, old.scores, scores)), strict=True)
        lists = [insert(tokens, listed, positions, tried) for tokens, listed, tried in subspaces]
        shape = *old.tokens.shape[:3], -1
        tokens, kept = (torch.stack(rows).view(shape) for rows in zip(*lists, strict=True))
        mean = (old.key_mean * old.keys + parts.sum(2)) / (old.keys + new)
        self.tables = replace(old, tokens=tokens, scores=kept, key_mean=mean, keys=old.keys + new)
        self.keys.write(old.keys, keys)
        self.open_row = self.tables.keys
        self.held.clear()  # held selections lack the appended tokens, which are now attended to only if selected
        read = old.tokens[0].numel() * ENTRY_BYTES / self.row_bytes
        if self.recent:
            self.tables = self._with_lists_of(torch.cat(self.recent, 2))
            self.recent, read = [], read + self.tables.keys
        order = torch.arange(new, device=keys.device).expand(len(keys), -1)
        return Appended(order, read)

    def _with_lists_of(self, query: torch.Tensor) -> Tables:
        """Return the tables with a few more centroids, clustered from queries [Hk, G, Q, D], and lists of all keys."""
        tables = self.tables
        parts = split_channels(query.flatten(1, 2), tables.channels)
        generator = torch.Generator(query.device).manual_seed(tables.keys)
        wanted = min(NEW_CENTROIDS, parts.shape[2])
        centroids = cosine_kmeans(parts.flatten(0, 1), wanted, NEW_ITERATIONS, generator).unflatten(0, parts.shape[:2])
        centroids = centroids.half().float()
        keys = split_channels(self.keys.rows, tables.channels)
        positions, scores = top_lists(centroids, keys, tables.tokens.shape[-1])
        return replace(
            tables,
            centroids=torch.cat([tables.centroids, centroids], 2),
            tokens=torch.cat([tables.tokens, positions + tables.first_token], 2),
            scores=torch.cat([tables.scores, scores], 2),
        )

    def remove_appended(self) -> torch.Tensor | None:
        """Restore the stored tables; return None if nothing was appended.

        Otherwise return an order [Hk, 0] of no rows, because appending does not move stored rows.
        """
        self.recent = []
        if self.tables is self.stored:
            return None
        self.tables, self.open_row = self.stored, self.stored.keys
        self.keys = GrowingRows(self.stored_keys)
        return torch.zeros(len(self.stored.centroids), 0, dtype=torch.int64, device=self.stored.centroids.device)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices [..., count], ascending, of the highest of scores [..., M]."""
    return best_tokens(scores, count).sort(-1).values


WEIGHTS = ("uniform", "fitted")


@methods.register("csattention")
@dataclass(frozen=True)
class CSAttention(Method):
    """Selects tokens by the posting lists of the query's nearest centroids."""

    needs_index: ClassVar[bool] = True
    learns_queries: ClassVar[bool] = True
    searched_on_host: ClassVar[bool] = True
    csattention_scoring: str = field(
        default="mean",
        metadata={
            "help": f"Score of the keys that a posting list leaves out: {', '.join(SCORINGS)}. mean is the mean of "
            "these keys' scores, floor the list's lowest score, paper 0."
        },
    )
    rerank: float = field(
        default=2.0,
        metadata={"help": "Rank this many times the budget's keys by exact logits, and attend to the best; 1: off."},
    )
    csattention_weights: str = field(
        default="uniform",
        metadata={"help": f"Weights of the subspaces' scores: {', '.join(WEIGHTS)} (in the build, by least squares)."},
    )
    backoff: float = field(
        default=0.0,
        metadata={
            "help": "Share of lookups that read two posting lists: those whose query has the lowest cosine to its "
            "nearest centroid."
        },
    )
    step: int = field(
        default=1, metadata={"steps": True, "help": "Number of consecutive generated tokens that share one selection."}
    )
    stream: bool = field(
        default=False,
        metadata={
            "appends": True,
            "help": (
                "Append generated tokens to the index's posting lists or clusters, for long answers. With "
                "clusters, one step in every --buffer steps is slow."
            ),
        },
    )
    buffer: int = field(
        default=128,
        metadata={
            "needs": {"stream": True},
            "help": (
                "With --stream, number of generated tokens that are appended together. Up to twice as many wait "
                "until then, and all of them are attended to."
            ),
        },
    )

    def __post_init__(self) -> None:
        check_choice("--csattention-scoring", self.csattention_scoring, SCORINGS)
        check_choice("--csattention-weights", self.csattention_weights, WEIGHTS)
        check_rerank(self.rerank)
        if not 0 <= self.backoff <= 1:
            raise UsageError(f"--backoff {self.backoff:g}: give a share from 0 to 1")
        check_at_least_one(self, "step", "buffer")

    def prepare(self, context: MiddleContext) -> TableSelector:
        """Create the selector of a layer. Loads the keys, and allocates the centroids in float32.

        The posting lists are not copied. Each append allocates new lists, and the first append also copies the keys. On
        a GPU, posting lists over `FEWEST_KEYS` keys or more are also stored by token, unless appending or backoff is
        on. The layout by token takes half a byte per list and key of the middle.
        """
        return TableSelector(
            context,
            scoring=self.csattention_scoring,
            rerank=self.rerank,
            fitted=self.csattention_weights == "fitted",
            backoff=_backoff_cosine(context.calibration, self.backoff),
            step=self.step,
            append_size=self.buffer if self.stream else 0,
        )

    def cycle(self) -> int:
        return self.step

    @classmethod
    def variants(cls, record: MethodRecord | None) -> dict[str, Self]:
        """Return the default variant, and variants without re-ranking: one per scoring, and one with fitted weights."""
        plain = {scoring: cls(csattention_scoring=scoring, rerank=1.0) for scoring in SCORINGS}
        return {"reranked": cls(), **plain, "mean fitted": cls(rerank=1.0, csattention_weights="fitted")}

    @classmethod
    def describe_lists(cls, context: MiddleContext, queries: torch.Tensor) -> ListShape:
        return describe_lists(context.tensors, context.keys, queries, context.first_token)


def _backoff_cosine(calibration: dict[str, Any], share: float) -> float | None:
    """Return the cosine below which `share` of the calibration lookups are; None for a share of 0."""
    if not share:
        return None
    cosines = calibration["cosines"]
    place = share * (len(cosines) - 1)
    low = int(place)
    high = min(low + 1, len(cosines) - 1)
    return float(cosines[low] + (place - low) * (cosines[high] - cosines[low]))
