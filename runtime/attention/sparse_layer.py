"""A cache layer that attends to selected rows of a stored context, and to every token after it."""

from collections.abc import Iterable

import torch

from sparsekv.formats.schema import Split
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.attention.plan import LayerPlan
from sparsekv.runtime.attention.step import step_of
from sparsekv.runtime.cache.kv_store import Pair
from sparsekv.runtime.cache.stored_layer import MissedShares, StepRow, StoredLayer
from sparsekv.runtime.selection.capabilities import HoldsSelections, ObservesQuestion


class SparseLayer(StoredLayer):
    """Attends to sinks, tail and new tokens exactly, and to the rows of the middle that a selector chooses.

    Args:
        exact: keys and values [Hk, sinks + tail, D] of the sinks and the tail.
    """

    def __init__(self, exact: Pair, split: Split, plan: LayerPlan):
        super().__init__(split.tokens, *exact)
        self.exact, self.split, self.plan = exact, split, plan
        self.read = plan.read

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        return self.plan.graph_state() is not None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        plan, decodes = self.plan, not self.prefills(call.query.shape[1])
        # Never during a question: its first tokens must not see an index that contains its last ones.
        if decodes and plan.appender is not None:
            plan.appender.append_due(self)
        decode = plan.decode if self.step_row is None else plan.captured
        if not decodes:
            self._forget_selections()
        policy = decode if decodes else plan.prefill
        return policy.attend(step_of(self, call)).flatten(0, 1)

    def reserve(self, step_row: StepRow, tokens: int) -> None:
        super().reserve(step_row, tokens)
        self.plan.read.deferred = True

    def buffers(self) -> tuple[int, ...]:
        return *super().buffers(), self.plan.graph_state() or 0

    def advance(self) -> None:
        super().advance()
        self.plan.read.advance()

    def release(self) -> None:
        super().release()
        self.plan.read.deferred = False

    def missed(self) -> MissedShares | None:
        meter = self.plan.meter
        return None if meter is None or not meter.heads else meter.means()

    def start_counting(self) -> None:
        self.plan.read.reset()
        if self.plan.meter is not None:
            self.plan.meter.reset()

    def rewind(self) -> None:
        super().rewind()
        self.start_counting()
        plan = self.plan
        if plan.prefetcher is not None:
            plan.prefetcher.forget()
        self._forget_selections()
        if isinstance(plan.selector, ObservesQuestion):
            plan.selector.forget_question()
        if plan.appender is not None:
            plan.appender.remove_appended(self, self.split.tokens, self.exact)

    def _forget_selections(self) -> None:
        if isinstance(self.plan.selector, HoldsSelections):
            self.plan.selector.forget_selections()


def appends(layers: Iterable[StoredLayer]) -> bool:
    """Whether one of the layers moves an answer's tokens into its index."""
    return any(isinstance(layer, SparseLayer) and layer.plan.appender is not None for layer in layers)
