"""Selection for a question's tokens by a method other than the one that decodes the answer."""

from dataclasses import replace

import torch

from sparsekv.runtime.attention.config import QuestionPrefill
from sparsekv.runtime.selection.interface import Selector
from sparsekv.runtime.selection.queries import Queries
from sparsekv.runtime.selection.selection import RowSet, Selection


class QuestionSearch:
    """Selects one layer's rows for a chunk of a question, as row indices in the decoding method's layout.

    Args:
        device: the selector's.
        layout: [Hk, M] int64, the middle position of each stored row; None for order of position.
    """

    def __init__(
        self,
        prefill: QuestionPrefill,
        selector: Selector,
        device: torch.device,
        layout: torch.Tensor | None,
    ):
        self.selector, self.budget, self.chunk_size = selector, prefill.budget, prefill.chunk_size
        self.device, self.rows_of = device, None if layout is None else layout.argsort(-1).to(device)

    def select(self, queries: Queries) -> Selection:
        """One selection for all queries [Hk, G, Q, D] of a chunk."""
        chosen = self.selector.select(queries.to(self.device), self.budget)
        rows, valid = chosen.rows.expand()
        for order in (self.selector.layout, self.rows_of):
            rows = rows if order is None else order[:, None].gather(-1, rows)
        lengths = None if valid is None else valid.long()
        return replace(chosen, rows=RowSet(rows, lengths, chosen.rows.capacity, log_weights=chosen.rows.log_weights))
