"""The selector of a layer that attends to all tokens."""

import torch

from sparsekv.runtime.selection.interface import (
    Budget,
    CentroidSegment,
    Cost,
    Queries,
    Residual,
    RowSet,
    Selection,
    Selector,
)


class EverythingSelector(Selector):
    """Selects all `middle` tokens, for any budget, and reads no index. Rows are stored in order of position."""

    question_piece = 32

    def __init__(self, middle: int):
        self.middle = middle

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Return one run of all rows, which all queries share."""
        starts = torch.zeros(len(queries.query), 1, 1, dtype=torch.int64, device=queries.query.device)
        rows = RowSet(starts, torch.full_like(starts, self.middle), self.middle, self.middle)
        return Selection(rows, Cost(0.0), Residual(lambda: (_nothing(queries.query),), attended=False))


def _nothing(query: torch.Tensor) -> CentroidSegment:
    """Return one centroid that represents no token, so that the missed mass is measured as 0."""
    centroid = query.new_zeros(len(query), 1, query.shape[3])
    return CentroidSegment(centroid, centroid.new_full((len(query), 1, 1), -torch.inf, dtype=torch.float32), centroid)
