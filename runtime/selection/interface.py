"""What a decoding method is, and the registry that finds them: one file a method, named nowhere else."""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

import torch

import sparsekv.runtime.methods
from sparsekv.formats.errors import UsageError
from sparsekv.formats.schema import LayerFacts, MethodRecord
from sparsekv.kernels.attention.decode_attention import StandIns
from sparsekv.kernels.tables.list_ranks import ExactKeys
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.cluster_statistics import Clustering
from sparsekv.runtime.selection.list_statistics import ListShape


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer stands among those that are indexed, counted from 0, and how many there are.

    `board` is one for all layers that are used together, and goes along with one cache or one report: what a layer
    leaves there under a name of its own, the layers after it find.
    """

    number: int = 0
    layers: int = 1
    board: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MiddleContext:
    """What a method selects from: one layer's middle keys [Hk, M, D] in order of position, how the layer attends,
    the tensors that the method's indexer built (token positions counted from the first middle token), its calibration
    and its parameters, the position of the first middle token, and those of the tensors that are views of the index's
    files, as they lie there.

    `load_values()` reads the values [Hk, M, D]; `observed` [Hk, G, W, D] are the last of the prompt's queries that a
    method may learn from, the half of the held-out tail that no report measures on; `place` is the layer's among the
    others.
    """

    keys: torch.Tensor
    facts: LayerFacts
    tensors: dict[str, torch.Tensor]
    calibration: dict[str, Any]
    parameters: dict[str, Any] = field(default_factory=dict)
    first_token: int = 0
    mapped: tuple[torch.Tensor, ...] = ()
    load_values: Callable[[], torch.Tensor] | None = None
    observed: torch.Tensor | None = None
    place: LayerPlace = field(default_factory=lambda: LayerPlace())


@dataclass(frozen=True)
class Asked:
    """Queries of one layer that rows are to be chosen for.

    query [Hk, G, Q, D], after RoPE; `positions()` [Q] int64 are theirs in the sequence. `exact_logsumexp()` is
    [Hk, G, Q], the log of the sum of exponents over all that is attended exactly anyway (sinks, tail, new tokens). Both
    are computed when a method asks for them. With `shared` there is one choice for all Q queries together (a question's
    prefill). Every layer that is asked about the same tokens is asked with the same `batch`. With a `counter` [Hk]
    int64 kernels attend to the rows where these lie, on a GPU and for one query: then a selection may tell by
    `stand_ins` alone what stands for the others, and what only the device knows may be counted there. `exact_keys` are
    those of what is attended exactly, where every query sees all of them.
    """

    query: torch.Tensor
    positions: Callable[[], torch.Tensor]
    exact_logsumexp: Callable[[], torch.Tensor]
    shared: bool
    batch: int = 0
    counter: torch.Tensor | None = None
    exact_keys: ExactKeys | None = None

    @property
    def in_place(self) -> bool:
        """Whether kernels attend to the chosen rows where these lie."""
        return self.counter is not None

    def to(self, device: torch.device) -> "Asked":
        """The same on another device; itself where it is there already."""
        if self.query.device == device:
            return self
        positions, exact = self.positions, self.exact_logsumexp
        moved = self.query.to(device)
        return Asked(moved, lambda: positions().to(device), lambda: exact().to(device), self.shared, self.batch)


@dataclass(frozen=True)
class Remainder:
    """Centroids of tokens that are not attended one by one, which tell how much attention those would have.

    keys [Hk, C, D]; log_counts [Hk, Q or 1, C] float32: the logarithm of how many such tokens each has.
    """

    keys: torch.Tensor
    log_counts: torch.Tensor


@dataclass(frozen=True)
class Replacement(Remainder):
    """Centroids that are attended in the place of their tokens (Multipole Attention, equation 2): values [Hk, C, D].

    `at_once` says the same for one decode step, where choosing has found the query's logits already.
    """

    values: torch.Tensor
    at_once: StandIns | None = None

    def to(self, device: torch.device) -> "Replacement":
        """The same on another device."""
        if self.keys.device == device:
            return self
        return Replacement(self.keys.to(device), self.log_counts.to(device), self.values.to(device))


@dataclass(frozen=True)
class ListedRows:
    """Rows of runs that kernels have written out [Hk, capacity] int32, and how many there are [Hk] int32; and zeros
    [Hk] int32, if there are, for the attention to count in."""

    rows: torch.Tensor
    used: torch.Tensor
    queue: torch.Tensor | None


@dataclass(frozen=True)
class Selection:
    """Chosen rows of the middle, as runs in the selector's layout: starts, lengths [Hk, Q or 1, R].

    `index_rows` is the number of D-sized rows read to choose them, beside keys and values: a number, or [Hk, Q or 1].
    `capacity` bounds the sum of the lengths of any one query. `replacements` stand for what was not chosen; where
    nothing does, `dropped()` estimates it, if the method can tell. `log_weights` [Hk, G, Q or 1, capacity] float32, for
    rows that were drawn and not ranked, are added to their logits, in the order of the runs. `taken` is the sum of the
    lengths of each query, where it is known without looking at them, and 0 where kernels count it; with `single_rows`
    every run is one row. For kernels alone, and one query, `listed` are the rows of the runs, `stand_ins` are in the
    place of replacements, and `each_counted` is how many D-sized rows were read for each that was added to the counter
    of what was asked.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    capacity: int
    index_rows: torch.Tensor | float
    replacements: tuple[Replacement, ...] = ()
    dropped: Callable[[], tuple[Remainder, ...]] | None = None
    log_weights: torch.Tensor | None = None
    taken: int | None = None
    single_rows: bool = False
    listed: ListedRows | None = None
    stand_ins: tuple[StandIns, ...] | None = None
    each_counted: int = 0


@dataclass(frozen=True)
class Taken:
    """New tokens that a selector took in: the order [Hk, T] in which rows lie from now on, as numbers of those it was
    given, and `index_rows`, the D-sized rows of each head that were read to find it."""

    order: torch.Tensor
    index_rows: float


class Selector(ABC):
    """One method, ready for one layer."""

    token_order: torch.Tensor | None = None
    """[Hk, M] int64: the layout in which the runs are runs, as middle positions; None for order of position."""

    takes: int = 0
    """How many tokens after the middle it takes in at a time; 0: none, they stay exact."""

    open_row: int = 0
    """The first row of the layout that moves when tokens are taken in."""

    mapped: tuple[torch.Tensor, ...] = ()
    """Views of the index's files that it may look at."""

    steps_alike: bool = True
    """Whether each decode step of an answer does what the one before did, so that one, captured, stands for all."""

    version: int = 0
    """Another one whenever steps look at other tensors from now on, so that what was captured before is of no use."""

    @abstractmethod
    def select(self, asked: Asked, budget: Budget) -> Selection:
        """Choose rows of the middle for queries, as many as the budget allows."""

    def attend_at_once(
        self,
        query: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor],
        exact: tuple[torch.Tensor, torch.Tensor],
        budget: Budget,
        sink_logits: torch.Tensor | None,
    ) -> tuple[torch.Tensor, float] | None:
        """One query's attention on a CPU to what `select` would choose, to what would stand for the rest and to exact
        rows, where one kernel does it all; None where none does.

        Args:
            query: [Hk, G, D].
            rows, exact: keys and values [Hk, M, D] where the middle's lie, and [Hk, E, D].
            sink_logits: [Hk, G].

        Returns:
            [Hk, G, D], and how many D-sized rows of the middle and of what it was chosen by were read for each head.
        """
        return None

    def observe(self, asked: Asked) -> None:  # noqa: B027  # most methods keep nothing of a question
        """See a question that another method chooses for; what a method keeps for the answer may depend on it."""

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> Taken:
        """Take in the tokens that follow the middle, which is longer from now on; only where `takes` is not 0.

        Args:
            keys, values: [Hk, T, D], the rows from `open_row` on as they lie, then `takes` new ones.
        """
        raise NotImplementedError

    def forget(self) -> torch.Tensor | None:
        """Forget what was taken in.

        Returns:
            [Hk, T]: the rows that lie again from `open_row` (as it is then) on, as numbers of those that lie there;
            None when nothing was taken in.
        """
        return None

    def in_reach(self, asked: Asked) -> torch.Tensor | None:
        """[Hk, Q, M] bool, in order of position: the tokens that a choice for these queries, each by itself, has any
        knowledge of; None for a method that knows them all."""
        return None

    def replace_by_own_clusters(self) -> bool:
        """Let centroids that the choice reads anyway stand for what it leaves; False where it has none."""
        return False


@dataclass(frozen=True)
class Method(ABC):
    """One method's online half: a frozen dataclass whose fields are its parameters and command-line options."""

    needs_index: ClassVar[bool] = False
    tells_missed: ClassVar[bool] = False
    """Whether each of its selections tells what it leaves, by replacements or by `dropped`."""
    learns_queries: ClassVar[bool] = False
    """Whether its index is built from queries of the document, so that it may suit these better than others."""
    searched_on_host: ClassVar[bool] = False
    """Whether its index is so big that it stays in host memory, and is searched there, where the rows do."""
    is_bound: ClassVar[bool] = False
    """Whether it bounds what a choice can do, and is none itself: what it counts as read is known only in hindsight."""

    @abstractmethod
    def prepare(self, context: MiddleContext) -> Selector:
        """Make ready for one layer; says in its docstring what it allocates."""

    def replaces(self) -> bool:
        """Whether something stands for what the method does not choose."""
        return False

    @classmethod
    def variants(cls, record: MethodRecord | None) -> dict[str, Self]:
        """The forms that a recall report compares, by name, the default first.

        Args:
            record: what the index says of the method, if it was built with it.
        """
        return {"": cls()}

    @classmethod
    def describe(cls, context: MiddleContext, values: torch.Tensor, biggest: int) -> Clustering | None:
        """What the method's indexer built for one layer, for a person to see; None when it has no clusters.

        Args:
            values: [Hk, M, D] of the middle, in order of position.
            biggest: how many of the biggest clusters to list.
        """
        return None

    @classmethod
    def describe_lists(cls, context: MiddleContext, queries: torch.Tensor) -> ListShape | None:
        """The lists of keys that the method's indexer made for one layer; None when it has none.

        Args:
            queries: [Hk, G, R, D], held out, to tell what ranks keys.
        """
        return None


METHODS: dict[str, type[Method]] = {}
T = TypeVar("T", bound=type[Method])


def register(name: str) -> Callable[[T], T]:
    """Class decorator: makes a method known to every command under this name."""

    def add(method: T) -> T:
        METHODS[name] = method
        return method

    return add


def methods() -> dict[str, type[Method]]:
    """All registered methods by name; imports every file of `runtime/methods` once."""
    _import_all()
    return dict(sorted(METHODS.items()))


@cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(sparsekv.runtime.methods.__path__):
        importlib.import_module(f"sparsekv.runtime.methods.{module.name}")


def choose_methods(names: list[str], indexed: list[str]) -> list[str]:
    """Names of the methods to run on an index that holds `indexed`: all that can for an empty list or `all`.

    Raises:
        UsageError: a method that does not exist, or that this index was not built with.
    """
    known = methods()
    usable = [name for name, method in known.items() if not method.needs_index or name in indexed]
    for name in names:
        if name not in known and name != "all":
            raise UsageError(f"no method '{name}'; there are: {', '.join(known)}")
        if name != "all" and name not in usable:
            raise UsageError(
                f"the index was not built with '{name}'; add it with `sparsekv build-index --method {name}` "
                f"or choose one of: {', '.join(usable)}"
            )
    return usable if not names or "all" in names else list(dict.fromkeys(names))
