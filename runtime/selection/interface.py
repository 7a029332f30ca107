"""The interface of methods: `Method` prepares a `Selector` for each layer, which selects rows for queries to a
budget."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.context_rows import Pair
from sparsekv.formats.index.schema import LayerFacts, MethodRecord
from sparsekv.kernels.attention.types import ScoredCentroids
from sparsekv.kernels.common.eight_bits import Int8Kernel
from sparsekv.kernels.common.runs import expand_full_runs, expand_runs
from sparsekv.kernels.posting_lists.types import ExactKeys
from sparsekv.runtime.selection.cluster_statistics import Clustering, ListShape


@dataclass(frozen=True)
class RowIndices:
    """Row indices that a kernel has written: rows [Hk, capacity] int32, of which the first used [Hk] int32 are valid.

    `queue` [Hk] int32 zeros, if there is one, is a work counter for the attention kernel.
    """

    rows: torch.Tensor
    used: torch.Tensor
    queue: torch.Tensor | None


@dataclass(frozen=True)
class RowSet:
    """Rows of the middle, as runs of consecutive rows in the selector's layout: starts, run_lengths [Hk, Q or 1, R].

    run_lengths: None where every run is one row. `capacity` is an upper bound of the rows of any one query. `total`:
    how many rows each query has, where the host knows it without a sync; 0 where kernels count them. `indices`: the
    same rows as plain indices, for one query or several that share them. log_weights [Hk, G, Q or 1, capacity] float32:
    added to the logits of rows that were sampled instead of ranked, in the order of the runs.
    """

    starts: torch.Tensor
    run_lengths: torch.Tensor | None
    capacity: int
    total: int | None = None
    indices: RowIndices | None = None
    log_weights: torch.Tensor | None = None

    def has_all(self, used: int) -> bool:
        """Whether it is one run of all `used` rows, for one query or several that share them."""
        return self.starts.shape[1:] == (1, 1) and self.total == used and self.run_lengths is not None

    @property
    def lengths(self) -> torch.Tensor:
        """[Hk, Q or 1, R]."""
        return torch.ones_like(self.starts) if self.run_lengths is None else self.run_lengths

    def counts(self) -> torch.Tensor | int:
        """Number of rows of each query [Hk, Q or 1], or `total` where it is known."""
        return self.lengths.sum(-1) if self.total is None else self.total

    def expand(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Row indices [Hk, Q or 1, capacity] int64, and which of them count, bool; None: all."""
        if self.run_lengths is None:
            return self.starts.long(), None
        if self.total == self.capacity and not self.starts.is_cuda:
            return expand_full_runs(self.starts, self.run_lengths, self.capacity), None
        return expand_runs(self.starts, self.run_lengths, self.capacity)


def single_rows(rows: torch.Tensor, log_weights: torch.Tensor | None = None) -> RowSet:
    """A row set of single rows [Hk, Q or 1, K]."""
    return RowSet(rows, None, rows.shape[-1], rows.shape[-1], log_weights=log_weights)


@dataclass(frozen=True)
class CentroidSegment:
    """Centroids that represent tokens which are not attended one by one: keys, values [Hk, C, D].

    log_counts [Hk, Q or 1, C] float32: the logarithm of the number of tokens that each represents. `scored`: the same
    with the logits of one decode step's query on the keys, where the selection has computed them already. `clusters`
    [Hk, C]: the number of each one's cluster; None: they are all clusters of a level, in order.
    """

    keys: torch.Tensor
    log_counts: torch.Tensor
    values: torch.Tensor
    scored: ScoredCentroids | None = None
    clusters: torch.Tensor | None = None

    def to(self, device: torch.device) -> "CentroidSegment":
        """The same on another device."""
        if self.keys.device == device:
            return self
        clusters = None if self.clusters is None else self.clusters.to(device)
        moved = self.keys.to(device), self.log_counts.to(device), self.values.to(device)
        return CentroidSegment(*moved, clusters=clusters)


@dataclass(frozen=True)
class Residual:
    """The tokens that were not chosen: each is represented by one centroid of `segments()`.

    attended: the centroids are attended instead of their tokens (Multipole Attention, equation 2); otherwise they only
    serve to estimate the missed attention. `in_place`: the same with logits, for kernels that attend in place.
    index_rows: D-sized rows read for the centroids beside those that scoring has read.
    """

    segments: Callable[[], tuple[CentroidSegment, ...]]
    attended: bool
    in_place: tuple[ScoredCentroids, ...] | None = None
    index_rows: float = 0.0


@dataclass(frozen=True)
class Cost:
    """D-sized index rows that were read per KV head to make a selection: a number, or [Hk, Q or 1].

    per_count: rows to add for each count in the counter that kernels were given, where they counted what was read.
    """

    index_rows: torch.Tensor | float
    per_count: int = 0


@dataclass(frozen=True)
class Selection:
    """Rows to attend to, the cost of selecting them, and centroids of the rest; None: there are none."""

    rows: RowSet
    cost: Cost
    rest: Residual | None = None

    def rows_read(self) -> torch.Tensor | float:
        """D-sized rows read per KV head: chosen keys and values, and the index; [Hk, Q or 1] or a number."""
        # Numbers stay Python numbers: copying one to the GPU as a tensor would wait for the GPU's pending work.
        return 2 * self.rows.counts() + self.cost.index_rows

    def attended_segments(self) -> tuple[CentroidSegment, ...]:
        """The centroids that are attended for the tokens that were not chosen."""
        return self.rest.segments() if self.rest is not None and self.rest.attended else ()

    def of_queries(self, queries: slice) -> "Selection":
        """The same for some of its queries; what all of them share stays as it is."""

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
    """Asks for a selection for one query that kernels on the same device will attend to in place.

    counter: [Hk] int64, to which selection kernels may add counts that only the device knows. exact: the keys that are
    always attended.
    """

    counter: torch.Tensor
    exact: ExactKeys


_PIECES = 2**20  # more than sequences that are decoded together


def piece_batch(start: int) -> int:
    """The batch offset of a question's piece that begins with query `start`.

    Layers attend to the pieces one after another, so each piece needs a ranking of its own.
    """
    return (start + 1) * _PIECES


def is_piece(batch: int) -> bool:
    """Whether a batch is that of a question's piece."""
    return batch >= _PIECES


@dataclass(frozen=True)
class Queries:
    """query [Hk, G, Q, D], after RoPE.

    `positions()` [Q] int64 are the queries' positions in the sequence; `exact_logsumexp()` [Hk, G, Q] is the
    log-sum-exp of their logits on the rows that are always attended (sinks, tail, new tokens), and of learned sinks
    (GPT-OSS). Both are computed only when a method calls them. `joint`: one selection for all Q queries together, as in
    a question's prefill. `batch` is a number for these tokens, the same in every layer, by which layers find a ranking
    they share (0 in decoding; see `piece_batch`).
    """

    query: torch.Tensor
    positions: Callable[[], torch.Tensor]
    exact_logsumexp: Callable[[], torch.Tensor]
    joint: bool
    batch: int = 0
    in_place: InPlace | None = None

    def to(self, device: torch.device) -> "Queries":
        """The same on another device; itself if it is already there. Drops `in_place` when it moves."""
        if self.query.device == device:
            return self
        positions, exact = self.positions, self.exact_logsumexp
        moved = self.query.to(device)
        return Queries(moved, lambda: positions().to(device), lambda: exact().to(device), self.joint, self.batch)


@dataclass(frozen=True)
class Budget:
    """A share of the middle (0 < value <= 1, a float) or a count of tokens (an int of 1 or more)."""

    value: float | int
    is_share: bool = field(init=False)

    def __post_init__(self) -> None:
        # Kept as a field so that everything (1.0) and one token (1) do not compare equal.
        object.__setattr__(self, "is_share", isinstance(self.value, float))

    @classmethod
    def parse(cls, text: str, option: str = "--budget") -> "Budget":
        """`0.05` and `5%` are shares, `1.0` and `100%` everything, `300` a number of tokens.

        Args:
            option: the option that an error message names.

        Raises:
            UsageError: not a number, not above 0, or a share above 1.
        """
        try:
            percent = text.endswith("%")
            value = float(text.removesuffix("%")) / 100 if percent else float(text)
        except ValueError:
            raise UsageError(f"{option} {text or repr(text)}: {_WANTED}") from None
        if not percent and value >= 1 and text.lstrip("+").isdigit():
            return cls(int(text))
        if not 0 < value <= 1:
            raise UsageError(f"{option} {text}: {_WANTED}")
        return cls(value)

    @classmethod
    def parse_each(cls, texts: Iterable[str]) -> list["Budget"]:
        """Budgets in the order given, each once: 5% and 0.05 are the same. Raises what `parse` raises."""
        return list(dict.fromkeys(cls.parse(text) for text in texts))

    def tokens(self, middle: int) -> int:
        """The budget in tokens for a middle of M tokens; at least 1, at most M."""
        count = self.value if isinstance(self.value, int) else round(self.value * middle)
        return max(1, min(middle, count))

    def share(self, middle: int) -> float:
        """The budget as a share of a middle of M tokens."""
        return self.tokens(middle) / middle

    def __str__(self) -> str:
        return str(self.value) if isinstance(self.value, int) else f"{100 * self.value:g}%"


_WANTED = "give a share of the document such as 0.05 or 5%, at most 1.0, or a number of tokens such as 300"


@dataclass(frozen=True)
class LayerPosition:
    """A layer's number among the indexed layers, counted from 0, and how many there are.

    `shared` is state shared by all layers of one cache or report: later layers read what earlier ones write under a
    method's name.
    """

    number: int = 0
    layers: int = 1
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MiddleContext:
    """One layer's middle, its attention settings, and the tensors, calibration and parameters of a method's indexer.

    `load_keys()` and `load_values()` read keys and values [Hk, M, D], in order of position, to the device of `tensors`;
    `load_observed()` reads the queries [Hk, G, W, D] of the tail's first half there: a method may learn from them, for
    reports measure on the second half. Positions in `token_order` are counted from the first middle token, whose own
    position in the prompt is `first_token`; those of other tensors are as the indexer gave them. `centroids_in_8_bits`:
    those of the finest clusters as kernels may read them, where they are stored so; `tensors` has what they mean.
    `mapped`: the views of the index's files in it.
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
        """[Hk, M, D], read at first use and cached."""
        return self.load_keys()


AttendStep = Callable[[torch.Tensor, Pair, Pair, Budget, torch.Tensor | None], tuple[torch.Tensor, float] | None]
ChooseForEach = Callable[[Queries, Budget, torch.Tensor], Selection | None]
ChooseTogether = Callable[[Queries, torch.Tensor, torch.Tensor, Budget, torch.Tensor | None], Selection]


@dataclass(frozen=True)
class SelectorKernels:
    """Kernels that do more than select for one query; None: there is none.

    `attend` runs on a CPU, the others on a GPU, where they sync with nothing and add the number of rows chosen to a
    counter [Hk] int64, if they are given one.

    Args:
        attend: selects and attends for one query [Hk, G, D]. Takes the query, the middle's keys and values [Hk, M, D]
            in layout order, exact keys and values [Hk, E, D], the budget, and sink logits [Hk, G] or None. Returns
            attention [Hk, G, D] to the rows that `select` would choose, to centroids if they replace the rest, and to
            exact rows; and how many D-sized rows of the middle and the index were read for each head. None where no
            kernel does all of it.
        choose_for_each: one selection of all rows that at least one of the queries chooses for itself; None where no
            kernel does it.
        choose_together: one selection of all rows that at least one of several sequences chooses. Takes queries
            [Hk, G, T, D], the tokens of one sequence after another; after which token each ends, [B] int32; whether its
            tokens are a question's, which share a choice, or one of an answer, [B] bool; budget and counter.
        chooses_together: whether `choose_together` covers a budget.
        rows_in_8_bits: how many keys and values of each head's centroids a step reads in int8.
    """

    attend: AttendStep
    choose_for_each: ChooseForEach | None = None
    choose_together: ChooseTogether | None = None
    chooses_together: Callable[[Budget], bool] = lambda budget: False
    rows_in_8_bits: int = 0


@dataclass(frozen=True)
class ConversationState:
    """State that a question and its answer leave in a selector. Sequences decoded together need a copy of it each.

    Args:
        forget: discards the state, before another question and when the cache is rewound.
        observe: records a question's queries for the answer that follows, when another method selects for the question
            itself. None: only steps of an answer leave a state.
    """

    forget: Callable[[], None]
    observe: Callable[[Queries], None] | None = None


@dataclass(frozen=True)
class Appended:
    """The new order [Hk, T] of the rows passed to `append`, as indices into them, and `index_rows`, the D-sized rows
    of each head that were read to compute it."""

    order: torch.Tensor
    index_rows: float


@dataclass(frozen=True)
class Appending:
    """Appends the tokens that follow the middle to a layer's index, so that they need not all be attended exactly.

    Args:
        size: how many tokens are appended at a time.
        open_row: the first row of the layout that moves when tokens are appended.
        append: appends tokens; the middle grows by as many. Takes keys and values [Hk, T, D]: the rows from `open_row`
            on, in layout order, then `size` new ones.
        remove: restores the stored index. Returns [Hk, T], the stored order of the rows from `open_row` (its restored
            value) on, as indices into the rows that lay there before the call; None when nothing was appended.
    """

    size: int
    open_row: Callable[[], int]
    append: Callable[[torch.Tensor, torch.Tensor], Appended]
    remove: Callable[[], torch.Tensor | None]


@dataclass(frozen=True)
class SelectorReport:
    """Facts about a selector's choices that reports and traces show; None: not known of this selector.

    Args:
        covered: [Hk, Q, M] bool, in order of position: the tokens that have a score when each of these queries selects
            for itself, such as those in the posting lists read. None: all have.
        centroid_of: [Hk, M] int64, in order of position: the centroid that represents each token of the middle, counted
            through the segments of a selection's rest; anything for tokens that were chosen.
    """

    covered: Callable[[Queries], torch.Tensor] | None = None
    centroid_of: Callable[[Sequence[CentroidSegment]], torch.Tensor] | None = None


class Selector(ABC):
    """One method prepared for one layer: selects rows.

    What only some selectors have is in four parts: `kernels`, `conversation`, `append` and `report`. A part is made
    when it is read and not kept in the selector, because a shallow copy of the selector must have parts of its own.
    """

    layout: torch.Tensor | None = None
    """[Hk, M] int64: the middle position of each stored row, ordered to make runs contiguous; None: by position."""
    question_piece: int | None = None
    """How many of a question's tokens share a selection at most, within the budget of all of them; None: each prefill
    step has one selection, within the budget of one token."""

    @abstractmethod
    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Choose rows of the middle for queries, within a budget."""

    @property
    def kernels(self) -> SelectorKernels | None:
        """Kernels that also attend, or choose for several sequences; None: `select` is all there is."""
        return None

    @property
    def conversation(self) -> ConversationState | None:
        """State of the current question; None: a selection depends on its own queries alone."""
        return None

    @property
    def append(self) -> Appending | None:
        """How new tokens are appended to the index; None: they stay exact."""
        return None

    @property
    def report(self) -> SelectorReport | None:
        """Facts about its choices; None: it scores all tokens, and no centroids represent the rest."""
        return None

    def graph_state(self) -> int | None:
        """Whether a captured decode step (a CUDA graph) can be replayed: a number that changes when steps read other
        tensors, or None where steps launch different kernels."""
        return 0

    def replace_by_own(self) -> bool:
        """Represent the tokens that are not chosen by the centroids that selecting scores; False where there are no
        value centroids."""
        return False

    def rest_of(self, chosen: torch.Tensor) -> Residual:
        """Centroids for the tokens that are False in `chosen` [Hk, M], which is in the layout's order. Selectors that
        replace these tokens have it, if queries can unite."""
        raise NotImplementedError


@dataclass(frozen=True)
class Method(ABC):
    """One method's online half: a frozen dataclass whose fields are its parameters and command-line options."""

    needs_index: ClassVar[bool] = False
    default_budget: ClassVar[float] = 0.1
    """The share of the middle that answers attend to where a person names no budget."""
    estimates_missed: ClassVar[bool] = False
    """Whether its selections have centroids of the rest, from which the missed share is estimated."""
    learns_queries: ClassVar[bool] = False
    """Whether its index is built from the document's queries, so that it may do better on these than on others."""
    searched_on_host: ClassVar[bool] = False
    """Whether its index, being big, stays in host memory and is searched there when the rows are kept there too."""
    is_bound: ClassVar[bool] = False
    """Whether it is an upper bound for selections and no usable method: the rows it counts are known in hindsight."""
    reads_all_keys: ClassVar[bool] = False
    """Whether a decode step reads every key to choose."""
    merges_heads: ClassVar[bool] = False
    """Whether one choice serves all KV heads, so that a process with only some of them cannot make it."""

    @abstractmethod
    def prepare(self, context: MiddleContext) -> Selector:
        """The selector of one layer. Implementations say in their docstring what they allocate."""

    def replaces(self) -> bool:
        """Whether centroids are attended for the tokens that the method does not choose."""
        return False

    def can_unite(self) -> bool:
        """Whether several queries can share the rows that any of them chooses; not where the rest is represented by
        the weights of a query's sample, or by the mean of what one query left."""
        return not self.replaces()

    def cycle(self) -> int:
        """Decode steps from one search to the next; the others reuse its selection."""
        return 1

    @classmethod
    def variants(cls, record: MethodRecord | None) -> dict[str, Self]:
        """The forms that a recall report compares, by name, the default first.

        Args:
            record: the method's record in the manifest; None if the index was built without it.
        """
        return {"": cls()}

    @classmethod
    def describe_clusters(cls, context: MiddleContext, values: torch.Tensor, biggest: int) -> Clustering | None:
        """Statistics of one layer's clusters for `inspect`; None: the indexer builds no clusters.

        Args:
            values: [Hk, M, D] of the middle, in order of position.
            biggest: how many of the biggest clusters to list.
        """
        return None

    @classmethod
    def describe_lists(cls, context: MiddleContext, queries: torch.Tensor) -> ListShape | None:
        """Statistics of one layer's posting lists for `inspect`; None: the indexer builds no posting lists.

        Args:
            queries: [Hk, G, R, D], held out, to measure each subspace's share in the ranking of keys.
        """
        return None


@dataclass(frozen=True)
class MethodSpec:
    """A registered method with its parameters; a budget is all that a decode step needs beside it.

    `variant` names the form among those of the method, empty for its only one. With `residual`, centroids represent
    the tokens that the method does not choose.
    """

    name: str
    variant: str
    method: Method
    residual: bool = False

    @property
    def title(self) -> str:
        """Method and variant, as tables show them."""
        return f"{self.name} {self.variant}".strip()
