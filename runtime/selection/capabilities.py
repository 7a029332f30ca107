"""Optional capabilities of selectors and methods, as protocols that callers test with isinstance."""

from typing import Protocol, runtime_checkable

import torch

from sparsekv.runtime.cache.kv_store import Pair
from sparsekv.runtime.selection.interface import Budget, Queries, Selection


@runtime_checkable
class FusedAttention(Protocol):
    """Selects and attends in one kernel, on a CPU."""

    def attend_fused(
        self,
        query: torch.Tensor,
        rows: Pair,
        exact: Pair,
        budget: Budget,
        sink_logits: torch.Tensor | None,
    ) -> tuple[torch.Tensor, float] | None:
        """One query's attention to the rows that `select` would choose, to centroids if it replaces the rest, and to
        exact rows; None where no kernel does all of it.

        Args:
            query: [Hk, G, D].
            rows: the middle's keys and values [Hk, M, D], in layout order.
            exact: keys and values [Hk, E, D].
            sink_logits: [Hk, G].

        Returns:
            [Hk, G, D], and how many D-sized rows of the middle and the index were read for each head.
        """


@runtime_checkable
class ChoosesTogether(Protocol):
    """Chooses for several questions at once, by kernels on a GPU."""

    def chooses_together(self, budget: Budget) -> bool:
        """Whether kernels cover this budget."""

    def choose_together(
        self, queries: Queries, ends: torch.Tensor, asks: torch.Tensor, budget: Budget, counter: torch.Tensor | None
    ) -> Selection:
        """One selection for all questions: the rows that at least one of them chooses, without a sync.

        Args:
            queries: [Hk, G, T, D], the tokens of one sequence after another.
            ends: [B] int32, after which token each ends; the tokens of one sequence have one choice.
            asks: [B] bool, whether a sequence's tokens are a question's, or else one of an answer.
            counter: [Hk] int64, to which the number of rows chosen is added.
        """


@runtime_checkable
class ChoosesForEach(Protocol):
    """Chooses for several queries at once, each for itself, by kernels on a GPU."""

    def choose_for_each(self, queries: Queries, budget: Budget, counter: torch.Tensor) -> Selection | None:
        """One selection for all queries: the rows that at least one of them chooses, without a sync; None where no
        kernels do that.

        Args:
            counter: [Hk] int64, to which the number of rows chosen is added.
        """


@runtime_checkable
class CentroidsIn8Bits(Protocol):
    """May read its centroids in 8 bits, as keys and values are stored."""

    @property
    def rows_in_8_bits(self) -> int:
        """How many keys and values of each head's centroids a step reads so."""
