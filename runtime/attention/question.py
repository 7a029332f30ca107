"""How a question's tokens attend to the document, where that is not as the answer's tokens do."""

from dataclasses import dataclass, replace

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import Method, Selector
from sparsekv.runtime.selection.queries import Queries
from sparsekv.runtime.selection.selection import Cost, RowSet, Selection

DENSE = "dense"
QUESTION_BUDGET = "1024"


@dataclass(frozen=True)
class QuestionPrefill:
    """One choice for each chunk of a question, by a method of its own; `method` is None for dense attention."""

    name: str
    method: Method | None
    budget: Budget
    chunk_size: int = 128

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise UsageError(f"--chunk-size {self.chunk_size}: give at least 1")


class QuestionSearch:
    """Finds one layer's rows for a chunk of a question, in the layout of the method that decodes.

    Args:
        selector: None for all rows.
        device: where the selector is.
        layout: [Hk, M] int64, the middle positions in the order in which rows lie; None for order of position.
        middle: M.
    """

    def __init__(
        self,
        prefill: QuestionPrefill,
        selector: Selector | None,
        device: torch.device,
        layout: torch.Tensor | None,
        middle: int,
    ):
        self.selector, self.budget, self.chunk_size, self.middle = selector, prefill.budget, prefill.chunk_size, middle
        self.device, self.rows_of = device, None if layout is None else layout.argsort(-1).to(device)

    def select(self, queries: Queries) -> Selection:
        """Rows for all queries [Hk, G, Q, D] of a chunk together."""
        if self.selector is None:
            starts = torch.zeros(len(queries.query), 1, 1, dtype=torch.int64, device=queries.query.device)
            return Selection(RowSet(starts, torch.full_like(starts, self.middle), self.middle), Cost(0.0))
        chosen = self.selector.select(queries.to(self.device), self.budget)
        rows, valid = chosen.rows.expand()
        for order in (self.selector.layout, self.rows_of):
            rows = rows if order is None else order[:, None].gather(-1, rows)
        lengths = None if valid is None else valid.long()
        return replace(chosen, rows=RowSet(rows, lengths, chosen.rows.capacity, log_weights=chosen.rows.log_weights))
