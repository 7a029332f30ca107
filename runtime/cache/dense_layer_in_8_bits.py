"""A cache layer that attends to a whole stored context, whose rows stay in 8 bits on a GPU."""

from collections.abc import Callable, Mapping
from functools import cached_property

import torch

from sparsekv.kernels.attention.types import RunRows
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.cache.dense_layer import DenseLayer, attend_to
from sparsekv.runtime.cache.kv_store import Pair
from sparsekv.runtime.cache.rows_in_8_bits import placed, side_by_side, units_of
from sparsekv.runtime.cache.stored_layer import StepRow


class DenseLayerIn8Bits(DenseLayer):
    """Attends to the whole stored context, to the numbers where they lie, on any device; without a window.

    Args:
        stored: gives the tensors of a context's file in 8 bits, on the model's device; called once, at the first use.
        nothing: [Hk, 0, D], on that device and of the model's dtype.
        tokens: how many are stored.
    """

    def __init__(self, stored: Callable[[], Mapping[str, torch.Tensor]], nothing: torch.Tensor, tokens: int):
        super().__init__(nothing, nothing)
        self.stored, self._read, self._nothing = tokens, stored, nothing

    @cached_property
    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return self._read()

    @cached_property
    def _runs(self) -> RunRows:
        rows = placed(side_by_side(self._tensors), self._tensors, units_of(self._tensors["value_scales"]))
        every = torch.arange(self.stored, dtype=torch.int32, device=self._nothing.device)
        every = every.expand(len(self._nothing), -1)
        return RunRows(rows.keys, rows.values, every, None, self.stored, scales=rows.scales)

    def shared(self) -> tuple[RunRows, Pair]:
        return self._runs, (self._nothing, self._nothing)

    def attend_before(self, call: AttentionCall, new: Pair) -> torch.Tensor:
        return self.attend_in_place(call, new)

    def _attend_once(self, call: AttentionCall) -> torch.Tensor:
        return self._decode(call)

    def _decode(self, call: AttentionCall) -> torch.Tensor:
        return attend_to(call, self._runs, self.exact_rows())

    def _decode_at(self, step_row: StepRow, call: AttentionCall) -> torch.Tensor:
        assert self.keys is not None
        assert self.values is not None
        return attend_to(call, self._runs, (self.keys, self.values), step_row.count)
