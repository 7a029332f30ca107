"""The interface of methods: a `Method` prepares, for each layer, a `Selector` that selects KV rows within a budget.

`methods` is the registry of all methods by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from functools import cached_property
from typing import Any, ClassVar, Self

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.context_rows import Pair
from sparsekv.formats.index.schema import LayerFacts, MethodRecord
from sparsekv.formats.registry import Registry
from sparsekv.kernels.common.kernel_inputs import Int8Kernel, ScoredCentroids
from sparsekv.kernels.common.row_operations import expand_full_runs, expand_runs
from sparsekv.kernels.posting_lists.list_ranks import ExactKeys
from sparsekv.runtime.selection.cluster_statistics import Clustering, ListShape


@dataclass(frozen=True)
class RowIndices:
    """Row indices [Hk, capacity or more] int32, of which each head's first `used` [Hk] int32 are valid.

    `queue` [Hk] int32 is zero at first. In it the attention kernel counts the rows that its programs have taken. None:
    the kernel divides the rows between its programs beforehand.
    """

    rows: torch.Tensor
    used: torch.Tensor
    queue: torch.Tensor | None


@dataclass(frozen=True)
class RowSet:
    """Rows between sinks and tail, as runs of consecutive rows in the selector's layout (its order of stored rows).

    Attributes:
        starts: [Hk, Q or 1, R], the first row of each of R runs, for each query or once for all Q queries.
        run_lengths: [Hk, Q or 1, R], the length of each run; None if every run is one row.
        capacity: upper bound of the number of rows of any query.
        total: number of rows of each query; None if it differs between queries or the host would need a sync to know
            it; 0 if kernels count the rows.
        indices: the same rows as single indices, for one query or for several queries that share the rows.
        log_weights: [Hk, G, Q or 1, capacity] float32, in the order of the runs: logarithms of the importance weights
            of sampled rows, which are added to the rows' logits. None: the rows are not sampled.
    """

    starts: torch.Tensor
    run_lengths: torch.Tensor | None
    capacity: int
    total: int | None = None
    indices: RowIndices | None = None
    log_weights: torch.Tensor | None = None

    def has_all(self, used: int) -> bool:
        """Whether the set is one run of all `used` rows between sinks and tail, which all queries share."""
        return self.starts.shape[1:] == (1, 1) and self.total == used and self.run_lengths is not None

    @property
    def lengths(self) -> torch.Tensor:
        """Length of each run [Hk, Q or 1, R]; all 1 if every run is one row."""
        return torch.ones_like(self.starts) if self.run_lengths is None else self.run_lengths

    def counts(self) -> torch.Tensor | int:
        """Return `total`, or the number of rows of each query [Hk, Q or 1] if `total` is None."""
        return self.lengths.sum(-1) if self.total is None else self.total

    def expand(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return row indices [Hk, Q or 1, capacity] int64 and a bool mask of the valid indices; None: all are valid."""
        if self.run_lengths is None:
            return self.starts.long(), None
        if self.total == self.capacity and not self.starts.is_cuda:
            return expand_full_runs(self.starts, self.run_lengths, self.capacity), None
        return expand_runs(self.starts, self.run_lengths, self.capacity)


def single_rows(rows: torch.Tensor) -> RowSet:
    """Build a row set in which each run is one of `rows` [Hk, Q or 1, K]."""
    return RowSet(rows, None, rows.shape[-1], rows.shape[-1])


@dataclass(frozen=True)
class CentroidSegment:
    """Centroids, with keys and values [Hk, C, D], that represent tokens to which queries do not attend individually.

    Attributes:
        log_counts: [Hk, Q or 1, C] float32, added to the logits of each centroid: the logarithm of the number of tokens
            that the centroid represents, or a fitted log-weight instead.
        scored: the same centroids with the logits of a decode step's query on the key centroids, if the selection has
            computed these logits.
        clusters: [Hk, C], index of each centroid's cluster. None: the centroids are all clusters of a level, in order.
    """

    keys: torch.Tensor
    log_counts: torch.Tensor
    values: torch.Tensor
    scored: ScoredCentroids | None = None
    clusters: torch.Tensor | None = None

    def to(self, device: torch.device) -> "CentroidSegment":
        """Return the segment on a device. A copy on another device has no `scored`."""
        if self.keys.device == device:
            return self
        clusters = None if self.clusters is None else self.clusters.to(device)
        moved = self.keys.to(device), self.log_counts.to(device), self.values.to(device)
        return CentroidSegment(*moved, clusters=clusters)


@dataclass(frozen=True)
class Residual:
    """Centroids of the tokens that were not selected.

    Attributes:
        segments: returns the centroids. Each unselected token is represented by one of them.
        attended: whether queries attend to the centroids instead of the tokens that were not selected (Multipole
            Attention, equation 2). Otherwise the centroids are used only to estimate the missed attention mass.
        in_place: the same centroids with their logits, for kernels that attend in place; None: `segments` is used.
        rows_of_union: D-sized index rows read per KV head by several queries that attend to the union of their
            selections and to the centroids of `Selector.rest_of`. None: these centroids were read for scoring.
    """

    segments: Callable[[], tuple[CentroidSegment, ...]]
    attended: bool
    in_place: tuple[ScoredCentroids, ...] | None = None
    rows_of_union: float | None = None


@dataclass(frozen=True)
class Cost:
    """Cost of a selection: `index_rows`, the D-sized index rows read per KV head, as a number or as [Hk, Q or 1].

    Kernels may count further rows in a counter on the device. Each count stands for `per_count` D-sized rows, such as
    2 rows (key and value) for each selected token.

    Several queries together read a common row once. If `index_rows` is a tensor, `shared` is the number of each query's
    rows that are common to all queries. If `index_rows` is a number, all rows except `unshared` are common. `unshared`
    is the number of rows of single tokens, such as re-ranked keys. Several queries read at most one such row per token.
    """

    index_rows: torch.Tensor | float
    per_count: int = 0
    shared: float = 0.0
    unshared: float = 0.0


@dataclass(frozen=True)
class Selection:
    """Rows to attend to, the cost of their selection, and `rest`, the centroids of the unselected tokens, or None."""

    rows: RowSet
    cost: Cost
    rest: Residual | None = None

    def rows_read(self) -> torch.Tensor | float:
        """Return the number of D-sized rows read per KV head, for selected keys and values and for the index.

        The result is a number, or a tensor [Hk, Q or 1]. Rows that only kernels count are not included (see `Cost`).
        """
        # Numbers stay Python numbers, because copying a number to the GPU waits for the GPU's pending work.
        return 2 * self.rows.counts() + self.cost.index_rows

    def attended_segments(self) -> tuple[CentroidSegment, ...]:
        """Return the centroids that are attended to instead of the tokens that were not selected, if there are any."""
        return self.rest.segments() if self.rest is not None and self.rest.attended else ()

    def of_queries(self, queries: slice) -> "Selection":
        """Return the selection for a slice of the queries. Tensors that all queries share are not sliced."""

        def some(rows: torch.Tensor, axis: int = 1) -> torch.Tensor:
            return rows[(slice(None),) * axis + (queries,)] if rows.shape[axis] > 1 else rows

        rows, read, rest = self.rows, self.cost.index_rows, self.rest
        lengths, weights = rows.run_lengths, rows.log_weights
        return replace(
            self,
            rows=replace(
                rows,
                starts=some(rows.starts),
                run_lengths=None if lengths is None else some(lengths),
                log_weights=None if weights is None else some(weights, 2),
            ),
            cost=replace(self.cost, index_rows=some(read) if isinstance(read, torch.Tensor) else read),
            rest=rest
            and replace(
                rest,
                segments=lambda: tuple(
                    replace(part, log_counts=some(part.log_counts), scored=None) for part in rest.segments()
                ),
            ),
        )


@dataclass(frozen=True)
class InPlace:
    """Further inputs of a single query's selection. If they are given, kernels read the selected rows without a copy.

    Attributes:
        counter: [Hk] int64 on the query's device. Selection kernels may add counts that the host does not know; each
            count stands for `Cost.per_count` rows.
        exact: the keys that are always attended to.
        rows: keys and values [Hk, M or more, D] of the stored rows between sinks and tail, in the selector's layout, so
            that kernels can prefetch the selected rows; None: they cannot be read in place, or are int8.
    """

    counter: torch.Tensor
    exact: ExactKeys
    rows: Pair | None = None


# Larger than any `Queries.batch` of a step without pieces, because fewer sequences than this are decoded together.
_PIECES = 2**20


def piece_batch(start: int) -> int:
    """Return the number to add to a question's `Queries.batch` for a piece of the question.

    A piece is a run of tokens that share a selection; `start` is the index in the step of the piece's first token.

    A layer attends for all pieces of a question, one after another, before the next layer runs. Therefore the layers
    share a ranking for each piece, under a separate key.
    """
    return (start + 1) * _PIECES


def is_piece(batch: int) -> bool:
    """Whether `batch` belongs to a piece of a question, and not to decoding."""
    return batch >= _PIECES


@dataclass(frozen=True)
class Queries:
    """Queries of one layer, after RoPE.

    `positions()` and `exact_logsumexp()` are computed only when a method calls them.

    Attributes:
        query: [Hk, G, Q, D], for Q tokens and for the G query heads of each of the Hk KV heads.
        positions: returns the positions of the queries in the sequence, [Q] int64.
        exact_logsumexp: returns the log-sum-exp [Hk, G, Q] of each query's logits on the rows that are always attended
            to (sinks, tail, new tokens) and of learned sink logits (GPT-OSS).
        joint: whether all Q queries share one selection, as in a question's prefill.
        batch: key under which the layers share a ranking for these tokens. It is 0, or, for a question of a batch, the
            question's number in the step, counted from 1. `piece_batch` makes the keys of the pieces of a question.
        in_place: further inputs for the selection of a single query whose rows kernels read in place; otherwise None.
    """

    query: torch.Tensor
    positions: Callable[[], torch.Tensor]
    exact_logsumexp: Callable[[], torch.Tensor]
    joint: bool
    batch: int = 0
    in_place: InPlace | None = None

    def of_tokens(self, places: slice) -> "Queries":
        """Return the queries of some of the tokens, without `in_place`."""
        positions, exact = self.positions, self.exact_logsumexp
        some = self.query[:, :, places]
        return Queries(some, lambda: positions()[places], lambda: exact()[..., places], self.joint, self.batch)

    def to(self, device: torch.device) -> "Queries":
        """Return the queries on a device. A copy to another device has no `in_place`."""
        if self.query.device == device:
            return self
        positions, exact = self.positions, self.exact_logsumexp
        moved = self.query.to(device)
        return Queries(moved, lambda: positions().to(device), lambda: exact().to(device), self.joint, self.batch)


@dataclass(frozen=True)
class Budget:
    """Number of tokens that a step may select in the middle, which is between sinks and tail.

    `value` is a share of the middle (a float, 0 < value <= 1) or a count of tokens (an int, at least 1).
    """

    value: float | int
    is_share: bool = field(init=False)

    def __post_init__(self) -> None:
        # `is_share` is a field, so that the share 1.0 (all tokens) and the count 1 (one token) do not compare equal.
        object.__setattr__(self, "is_share", isinstance(self.value, float))

    @classmethod
    def parse(cls, text: str, option: str = "--budget") -> "Budget":
        """Parse a budget: `0.05` and `5%` are shares, `1.0` and `100%` are all tokens, and `300` is a count of tokens.

        Args:
            option: command-line option for the error message.

        Raises:
            UsageError: the text is no number, not above 0, or a share above 1.
        """
        try:
            percent = text.endswith("%")
            # Decimal arithmetic makes 2.9% exactly equal to 0.029.
            value = float(Decimal(text.removesuffix("%")) / 100) if percent else float(text)
        except (ValueError, InvalidOperation):
            raise UsageError(f"{option} {text or repr(text)} is not a budget: {_WANTED}") from None
        if not percent and value >= 1 and text.lstrip("+").isdigit():
            return cls(int(text))
        if not 0 < value <= 1:
            raise UsageError(f"{option} {text} is not a budget: {_WANTED}")
        return cls(value)

    @classmethod
    def parse_each(cls, texts: Iterable[str]) -> list["Budget"]:
        """Parse texts and return the distinct budgets in order; 5% and 0.05 are equal. Raises the errors of `parse`."""
        return list(dict.fromkeys(cls.parse(text) for text in texts))

    def tokens(self, middle: int) -> int:
        """Return the number of tokens that the budget allows among `middle` tokens: at least 1, at most `middle`."""
        count = self.value if isinstance(self.value, int) else round(self.value * middle)
        return max(1, min(middle, count))

    def share(self, middle: int) -> float:
        """Return the budget as a share of the `middle` tokens."""
        return self.tokens(middle) / middle

    def told(self, middle: int) -> str:
        """Return the budget as a share and as a number of the `middle` tokens, first as it was given."""
        count = self.tokens(middle)
        tokens = f"{count:,} token{'s' * (count != 1)}"
        return f"{tokens} ({count / middle:.1%})" if isinstance(self.value, int) else f"{self} ({tokens})"

    def __str__(self) -> str:
        return str(self.value) if isinstance(self.value, int) else f"{100 * self.value:g}%"


_WANTED = "give a share of the document such as 0.05 or 5%, at most 1.0, or a number of tokens such as 300"


@dataclass(frozen=True)
class LayerPosition:
    """A layer's index among the indexed layers, counted from 0, and the number of indexed layers.

    `shared` is a dictionary that all layers of one cache or report share. Later layers read the entry that an earlier
    layer has stored under the method's name.
    """

    number: int = 0
    layers: int = 1
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MiddleContext:
    """Inputs of a selector in one layer: keys, values, attention settings, and tensors built by a method's indexer.

    Keys and values are those of the middle: the M tokens between the document's first tokens (sinks) and its last
    tokens (tail). Every query attends to sinks and tail exactly. Positions in the tensor `token_order` are counted from
    the first middle token. Positions in other tensors are as the indexer stored them.

    Attributes:
        load_keys: reads the keys [Hk, M, D], in order of position, to the device of `tensors`.
        load_values: reads the values [Hk, M, D] in the same way.
        load_observed: reads the queries [Hk, G, W, D] of the tail's first half to the same device. A method may use
            these queries, because reports measure only on the second half.
        first_token: position in the prompt of the first middle token.
        facts: the layer's attention settings, from the manifest.
        tensors: the tensors that the method's indexer built for the layer.
        calibration, parameters: those of the method's record in the manifest; empty without a record.
        position: the layer's index among the indexed layers.
        centroids_in_8_bits: int8 centroids of the finest clusters for kernels, if the index stores int8 centroids.
            `tensors` has the dequantised centroids.
        mapped: the tensors of this context that are views of memory-mapped index files.
    """

    load_keys: Callable[[], torch.Tensor]
    load_values: Callable[[], torch.Tensor]
    load_observed: Callable[[], torch.Tensor]
    facts: LayerFacts
    tensors: dict[str, torch.Tensor]
    calibration: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    first_token: int = 0
    position: LayerPosition = field(default_factory=LayerPosition)
    centroids_in_8_bits: Int8Kernel | None = None
    mapped: tuple[torch.Tensor, ...] = ()

    @cached_property
    def keys(self) -> torch.Tensor:
        """Keys [Hk, M, D] of the tokens between sinks and tail, read at first use and cached."""
        return self.load_keys()


AttendStep = Callable[[torch.Tensor, Pair, Pair, Budget, torch.Tensor | None], tuple[torch.Tensor, float] | None]
ChooseForEach = Callable[[Queries, Budget, torch.Tensor], Selection | None]
ChooseTogether = Callable[[Queries, torch.Tensor, torch.Tensor, Budget, torch.Tensor | None], Selection]


@dataclass(frozen=True)
class SelectorKernels:
    """Optional kernels of a selector, as functions; None: the selector has no such kernel.

    `attend` runs on a CPU. `choose_for_each` and `choose_together` run on a GPU and cause no sync. The latter two add
    the number of selected rows to a counter [Hk] int64, if the caller passes one.

    Args:
        attend: selects and attends for one query [Hk, G, D]. Takes the query, the middle's keys and values [Hk, M, D]
            in layout order, and the exact keys and values [Hk, E, D] of sinks, tail and new tokens. Also takes the
            budget, and sink logits [Hk, G] or None. Returns the attention output [Hk, G, D] and the number of D-sized
            rows of the middle and the index read for each head. The output covers the rows that `select` would choose,
            the exact keys and values, and centroids if these represent the other tokens. Returns None if no kernel
            supports the call.
        choose_for_each: returns one selection of all rows that at least one of the queries chooses for itself. Returns
            None if no kernel supports the call.
        choose_together: returns one selection of all rows that at least one of several sequences chooses. Takes queries
            [Hk, G, T, D] of all tokens, one sequence after another; the end of each sequence in the T tokens, [B]
            int32; a mask of the sequences that are questions, [B] bool; the budget; and the counter. The tokens of a
            question share a selection. Any other sequence is one token of an answer.
        chooses_together: whether `choose_together` supports a budget.
        rows_in_8_bits: number of int8 key and value centroids of each head that a step reads.
    """

    attend: AttendStep
    choose_for_each: ChooseForEach | None = None
    choose_together: ChooseTogether | None = None
    chooses_together: Callable[[Budget], bool] = lambda budget: False
    rows_in_8_bits: int = 0


@dataclass(frozen=True)
class ConversationState:
    """State of a selector that depends on the current question and answer. Each sequence of a batch needs its own copy.

    Args:
        forget: discards the state. Called before another question and when the cache is rewound.
        observe: records a question's queries for its answer. Called if the question's tokens do not select by this
            method, but attend densely or select by another method. None: only decode steps of an answer change the
            state.
    """

    forget: Callable[[], None]
    observe: Callable[[Queries], None] | None = None


@dataclass(frozen=True)
class Appended:
    """Result of `Appending.append`.

    `order` [Hk, T] is the new storage order of the rows that were passed to `append`, as indices into these rows.
    `index_rows` is the number of D-sized rows of each head that were read to compute the order.
    """

    order: torch.Tensor
    index_rows: float


@dataclass(frozen=True)
class Appending:
    """Functions that append new tokens to the indexed tokens (the middle) of a layer.

    Queries need not attend to all appended tokens, because the selector chooses among them.

    Args:
        size: number of tokens that one call appends.
        open_row: returns the first row of the layout that an append may move.
        append: appends `size` tokens to the middle. Takes keys and values [Hk, T, D]: the rows from `open_row` on, in
            layout order, then the `size` new rows.
        remove: restores the stored index. Returns the order [Hk, T] in which the T rows from the restored `open_row` on
            were stored, as indices into the present rows from that row on. Returns None if nothing was appended.
    """

    size: int
    open_row: Callable[[], int]
    append: Callable[[torch.Tensor, torch.Tensor], Appended]
    remove: Callable[[], torch.Tensor | None]


@dataclass(frozen=True)
class SelectorReport:
    """Functions that describe a selector's choices for reports and traces.

    Args:
        covered: returns a mask [Hk, Q, M] bool, in order of position, of the tokens that each query scores when it
            selects for itself. With posting lists, these are the tokens of the lists that the query reads. None: all
            tokens are scored.
        centroid_of: returns [Hk, M] int64, in order of position: the index of the centroid that represents each token
            of the middle, counted through the segments of a selection's `rest`. The indices of selected tokens are
            arbitrary. None: no centroids represent tokens.
    """

    covered: Callable[[Queries], torch.Tensor] | None = None
    centroid_of: Callable[[Sequence[CentroidSegment]], torch.Tensor] | None = None


class Selector(ABC):
    """A method prepared for one layer, which selects rows.

    Optional functions are in four properties: `kernels`, `conversation`, `append` and `report`. Each access to such a
    property creates a new object. The selector does not store the object, because the objects of a shallow copy must
    refer to the copy.
    """

    layout: torch.Tensor | None = None
    """Middle position of each stored row [Hk, M] int64, in an order that makes runs contiguous; None: by position."""
    question_piece: int | None = None
    """Largest number of a question's tokens that share a selection.

    The selection's budget is the sum of the tokens' budgets, at most all tokens between sinks and tail. None: each
    prefill step has one selection, within the budget of one token.
    """

    @abstractmethod
    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select rows between sinks and tail for queries, within a budget. A choice by a threshold may exceed it."""

    @property
    def kernels(self) -> SelectorKernels | None:
        """Kernels that also attend, or that select for several sequences; None: the selector has only `select`."""
        return None

    @property
    def conversation(self) -> ConversationState | None:
        """State of the current question; None: a selection depends only on its own queries."""
        return None

    @property
    def append(self) -> Appending | None:
        """Functions that append new tokens to the index; None: every query attends to all new tokens."""
        return None

    @property
    def report(self) -> SelectorReport | None:
        """Functions that describe the selections for reports and traces.

        None: all tokens are scored, and no centroids represent unselected tokens.
        """
        return None

    def graph_state(self) -> int | None:
        """Return a number that changes when decode steps read other tensors than a CUDA graph of an earlier step.

        None if decode steps differ in the kernels that they launch, so that no CUDA graph of a step can be replayed.
        """
        return 0

    def replace_by_own(self) -> bool:
        """Switch to attending to the selector's own centroids, instead of the tokens that are not selected.

        Returns True after the switch, and False if the selector lacks centroids of keys or of values.
        """
        return False

    def rest_of(self, chosen: torch.Tensor) -> Residual:
        """Return centroids for the tokens that are False in `chosen` [Hk, M] bool, which is in the layout's order.

        This function is implemented only by selectors that attend to centroids instead of unselected tokens, and whose
        method's `can_unite` returns True.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Method(ABC):
    """A method of selecting tokens: a frozen dataclass whose fields are its parameters and command-line options."""

    needs_index: ClassVar[bool] = False
    ignores_budget: ClassVar[bool] = False
    """Whether selections are the same for any budget."""
    estimates_missed: ClassVar[bool] = False
    """Whether selections have centroids of the unselected tokens, from which the missed mass is estimated."""
    learns_queries: ClassVar[bool] = False
    """Whether the index is built from the document's queries, and may be less accurate for other queries."""
    searched_on_host: ClassVar[bool] = False
    """Whether the index stays in host memory, and is searched there, if keys and values are not on the GPU."""
    is_bound: ClassVar[bool] = False
    """Whether the method is only an upper bound of recall, because its count of read rows omits the search."""
    reads_all_keys: ClassVar[bool] = False
    """Whether each decode step reads, and counts as read, every key, so that the KV fraction is above 0.5."""
    merges_heads: ClassVar[bool] = False
    """Whether all KV heads share one selection, which a process that has only some of the heads cannot compute."""

    @classmethod
    def default_budget(cls, middle: int) -> Budget:
        """Return the budget that answers get if the user gives none, for `middle` tokens between sinks and tail."""
        return Budget(0.1)

    @abstractmethod
    def prepare(self, context: MiddleContext) -> Selector:
        """Prepare the selector of one layer. Implementations document in their docstring what they allocate."""

    def replaces(self) -> bool:
        """Whether the method represents the tokens that it does not select: by centroids, by a mean value, or by the
        weights of a sample."""
        return False

    def can_unite(self) -> bool:
        """Whether several queries can share the union of their selections.

        They cannot share a union if unselected tokens are represented by something that holds for one query only: the
        weights of the query's sample, or the mean of the tokens that the query did not select.
        """
        return not self.replaces()

    def cycle(self) -> int:
        """Return the number of decode steps per search of the index. Steps between two searches reuse a selection."""
        return 1

    @classmethod
    def variants(cls, record: MethodRecord | None) -> dict[str, Self]:
        """Return the variants of the method that a recall report compares, by name, with the default variant first.

        Args:
            record: the method's record in the manifest; None if the index was built without it.
        """
        return {"": cls()}

    @classmethod
    def describe_clusters(cls, context: MiddleContext, values: torch.Tensor, biggest: int) -> Clustering | None:
        """Compute statistics of one layer's clusters for `inspect`; None: the indexer builds no clusters.

        Args:
            values: values [Hk, M, D] of the tokens between sinks and tail, in order of position.
            biggest: number of the biggest clusters to list, and number of the clusters of largest spread.
        """
        return None

    @classmethod
    def describe_lists(cls, context: MiddleContext, queries: torch.Tensor) -> ListShape | None:
        """Compute statistics of one layer's posting lists for `inspect`; None: the indexer builds no posting lists.

        Args:
            queries: held-out queries [Hk, G, R, D], to measure each subspace's share in the ranking of keys.
        """
        return None


@dataclass(frozen=True)
class MethodSpec:
    """A registered method with its parameters, without a budget.

    `variant` names these parameters in tables; it can be empty. With `residual`, centroids represent the tokens that
    the method does not select.
    """

    name: str
    variant: str
    method: Method
    residual: bool = False

    @property
    def title(self) -> str:
        """Method name and variant, as tables show them."""
        return f"{self.name} {self.variant}".strip()


methods: Registry[type[Method]] = Registry("method", "sparsekv.runtime.methods", "sparsekv.methods", Method)

DENSE = "dense"
"""Name of dense attention, the baseline of all methods. Dense attention is not a registered method."""
