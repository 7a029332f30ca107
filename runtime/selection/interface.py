"""What a decoding method is: parameters that are made ready for one layer, and then choose rows for its queries."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from sparsekv.formats.schema import MethodRecord
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.queries import Queries
from sparsekv.runtime.selection.selection import Selection


class Selector(ABC):
    """One method, ready for one layer. What only some can do is a protocol of `capabilities`."""

    layout: torch.Tensor | None = None
    """[Hk, M] int64: the order in which rows lie, as middle positions, so that runs are runs; None: by position."""

    @abstractmethod
    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Choose rows of the middle for queries, as many as the budget allows."""


@dataclass(frozen=True)
class Method(ABC):
    """One method's online half: a frozen dataclass whose fields are its parameters and command-line options."""

    needs_index: ClassVar[bool] = False
    tells_missed: ClassVar[bool] = False
    """Whether each of its selections tells what it leaves, by centroids of the rest."""
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
