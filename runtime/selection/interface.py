"""The interface of a decoding method: `Method` holds parameters, and prepares a `Selector` for each layer."""

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
    """One method prepared for one layer: selects rows. Optional abilities are the protocols of `capabilities`."""

    layout: torch.Tensor | None = None
    """[Hk, M] int64: the middle position of each stored row, ordered to make runs contiguous; None: by position."""

    @abstractmethod
    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Choose rows of the middle for queries, within a budget."""


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

    @abstractmethod
    def prepare(self, context: MiddleContext) -> Selector:
        """The selector of one layer. Implementations say in their docstring what they allocate."""

    def replaces(self) -> bool:
        """Whether centroids are attended for the tokens that the method does not choose."""
        return False

    @classmethod
    def variants(cls, record: MethodRecord | None) -> dict[str, Self]:
        """The forms that a recall report compares, by name, the default first.

        Args:
            record: the method's record in the manifest; None if the index was built without it.
        """
        return {"": cls()}
