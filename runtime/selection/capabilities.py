"""What only some selectors and methods can do, as protocols: whoever needs one asks an object whether it has it."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from sparsekv.runtime.cache.kv_store import Pair
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.cluster_statistics import Clustering
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.list_statistics import ListShape
from sparsekv.runtime.selection.queries import Queries


@dataclass(frozen=True)
class Appended:
    """The order [Hk, T] in which rows lie once tokens were appended, as numbers of those that were given, and
    `index_rows`, the D-sized rows of each head that were read to find it."""

    order: torch.Tensor
    index_rows: float


@runtime_checkable
class Appendable(Protocol):
    """Takes the tokens that follow the middle into its index, so that they need not be attended one by one."""

    @property
    def append_size(self) -> int:
        """How many tokens are appended at a time; 0: none, they stay exact."""

    @property
    def open_row(self) -> int:
        """The first row of the layout that moves when tokens are appended."""

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Appended:
        """Take in the tokens that follow the middle, which is longer from now on.

        Args:
            keys, values: [Hk, T, D], the rows from `open_row` on as they lie, then `append_size` new ones.
        """

    def remove_appended(self) -> torch.Tensor | None:
        """Back to the stored index.

        Returns:
            [Hk, T]: the rows that lie again from `open_row` (as it is then) on, as numbers of those that lie there;
            None when nothing was appended.
        """


@runtime_checkable
class FusedAttention(Protocol):
    """Chooses and attends in one kernel, on a CPU."""

    def attend_fused(
        self,
        query: torch.Tensor,
        rows: Pair,
        exact: Pair,
        budget: Budget,
        sink_logits: torch.Tensor | None,
    ) -> tuple[torch.Tensor, float] | None:
        """One query's attention to what `select` would choose, to what would stand for the rest and to exact rows;
        None where no kernel does it all.

        Args:
            query: [Hk, G, D].
            rows, exact: keys and values [Hk, M, D] where the middle's lie, and [Hk, E, D].
            sink_logits: [Hk, G].

        Returns:
            [Hk, G, D], and how many D-sized rows of the middle and of what it was chosen by were read for each head.
        """


@runtime_checkable
class ObservesQuestion(Protocol):
    """Keeps something of a question for the answer that follows."""

    def observe(self, queries: Queries) -> None:
        """See a question that another method chooses for."""

    def forget_question(self) -> None:
        """Back to what is known without one."""


@runtime_checkable
class GraphState(Protocol):
    """Decides whether one decode step, captured, stands for those after it. Without it each does."""

    def graph_state(self) -> int | None:
        """None: steps differ from one another; else another number whenever they read other tensors from now on."""


@runtime_checkable
class Covers(Protocol):
    """Knows of some tokens alone, such as those that its lists name."""

    def covered(self, queries: Queries) -> torch.Tensor | None:
        """[Hk, Q, M] bool, in order of position: the tokens that a choice for these queries, each by itself, has any
        knowledge of; None: of all."""


@runtime_checkable
class OwnCentroids(Protocol):
    """Reads centroids to choose, which can stand for what it leaves."""

    def replace_by_own(self) -> bool:
        """Let them; False where it has no value centroids."""


@runtime_checkable
class DescribesClusters(Protocol):
    """A method whose indexer builds clusters."""

    @classmethod
    def describe_clusters(cls, context: MiddleContext, values: torch.Tensor, biggest: int) -> Clustering:
        """One layer's clusters, for a person to see.

        Args:
            values: [Hk, M, D] of the middle, in order of position.
            biggest: how many of the biggest clusters to list.
        """


@runtime_checkable
class DescribesLists(Protocol):
    """A method whose indexer builds lists of keys."""

    @classmethod
    def describe_lists(cls, context: MiddleContext, queries: torch.Tensor) -> ListShape:
        """One layer's lists, for a person to see.

        Args:
            queries: [Hk, G, R, D], held out, to tell what ranks keys.
        """
