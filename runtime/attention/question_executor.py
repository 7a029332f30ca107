"""The executor of a question's tokens on a GPU: they attend to what they choose together where it lies."""

import torch

from sparsekv.kernels.attention.shared_attention import OwnRows, of_last
from sparsekv.kernels.attention.shared_decode import shared_decode
from sparsekv.kernels.attention.types import Centroids, RunRows
from sparsekv.runtime.attention.executors import Attended, GatherExecutor
from sparsekv.runtime.attention.in_place import everything
from sparsekv.runtime.attention.step import Step
from sparsekv.runtime.cache.kv_store import Pair, PlacedRows
from sparsekv.runtime.selection.interface import Selector
from sparsekv.runtime.selection.selection import RowSet, Selection


class QuestionExecutor(GatherExecutor):
    """Attends by kernels that read rows in place, once for all tokens.

    It copies rows, as its base class does, where they carry weights of a sample, and where what stands for the rest has
    several levels or differs from token to token."""

    def attend_to(self, step: Step, selection: Selection, selector: Selector) -> Attended:
        rows, parts = self.middle.in_place(), selection.attended_segments()
        plain = selection.rows.log_weights is None and selection.rows.starts.shape[1] == 1
        if rows is None or not plain or len(parts) > 1 or any(part.log_counts.shape[1] > 1 for part in parts):
            return super().attend_to(step, selection, selector)
        seen_by_all, own = _exact_and_own(step)
        centroids = [Centroids(part.keys, part.values, part.log_counts[:, 0]) for part in parts]
        if selection.rows.has_all(self.middle.used):
            runs, seen_by_all = everything(rows, self.middle.used, seen_by_all)
        else:
            runs = _single_rows(rows, selection.rows)
        output = shared_decode(step.query, runs, seen_by_all, centroids, own, *step.how)
        return Attended(output, selection.rows_read())

    def attend_to_everything(self, step: Step) -> torch.Tensor:
        if (rows := self.middle.in_place()) is None:
            return super().attend_to_everything(step)
        seen_by_all, own = _exact_and_own(step)
        runs, seen_by_all = everything(rows, self.middle.used, seen_by_all)
        return shared_decode(step.query, runs, seen_by_all, (), own, *step.how)


def _exact_and_own(step: Step) -> tuple[Pair, OwnRows]:
    """Exact rows before the first of a step's tokens, which are seen by all of them, and what each sees of theirs."""
    before, tokens = step.first - step.unstored, step.query.shape[2]
    new = slice(before, before + tokens)
    return (step.keys[:, :before], step.values[:, :before]), of_last(step.keys[:, new], step.values[:, new], tokens)


def _single_rows(rows: PlacedRows, chosen: RowSet) -> RunRows:
    """Chosen rows as references into keys and values in place, row by row."""
    places, valid = chosen.expand()
    used = None if valid is None else valid[:, 0].sum(-1, dtype=torch.int32)
    return RunRows(rows.keys, rows.values, places[:, 0], None, chosen.capacity, used, scales=rows.scales)
