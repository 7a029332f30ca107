"""Reads an index's rows to a GPU ahead of the probe, which attends to them while the next cache is made of them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from sparsekv.formats.context_rows import ContextRows
from sparsekv.formats.device_read import device_reader
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.cache.dense_layer_in_8_bits import DenseLayerIn8Bits
from sparsekv.runtime.cache.layer_rows import LayerRows

AHEAD = 2
"""Layers that are read to a GPU at a time: the second is begun before the last pieces of the first are there."""


class RowsAhead:
    """Layers' rows, read by threads in the order in which they are begun. Each layer's are let go of once the probe has
    attended to them and whoever took them releases them."""

    def __init__(self, device: torch.device):
        device_reader(device)  # here, as two threads that need it would make two
        self._device, self._rows = device, dict[int, LayerRows]()
        self._reading: dict[int, Future[ContextRows]] = {}
        self._preparing: dict[int, Future[None]] = {}
        self._readers = ThreadPoolExecutor(AHEAD, thread_name_prefix="rows-ahead")
        self._others = ThreadPoolExecutor(AHEAD, thread_name_prefix="beside-rows")
        self._beside: Future[None] | None = None

    def begin(self, layer: int, rows: LayerRows) -> Callable[[], ContextRows]:
        """Read a layer's rows; returns what waits for them, to be called once."""
        reading = [self._readers.submit(rows.stored_on, self._device)]
        self._rows[layer], self._reading[layer] = rows, reading[0]
        return lambda: reading.pop().result()

    def prepare(self, name: str) -> None:
        """Read the tensors that a method built for the layers that were begun, and check their values."""
        for layer, rows in self._rows.items():
            self._preparing[layer] = self._others.submit(rows.check_method, name, self._device)

    def take(self, layer: int) -> LayerRows | None:
        """The rows of a layer that was begun, once they are read; raises what reading or checking them raises."""
        rows = self._rows.pop(layer, None)
        if rows is not None:
            self._reading.pop(layer).result()
            if layer in self._preparing:
                self._preparing.pop(layer).result()
        return rows

    def beside(self, compute: Callable[[], None]) -> None:
        """Compute on the GPU in a thread of its own."""

        def on_device() -> None:
            with torch.cuda.device(self._device):  # a thread begins with the first one
                compute()

        self._beside = ThreadPoolExecutor(1, thread_name_prefix="probe").submit(on_device)

    def end(self) -> None:
        """Wait for what was computed beside; raises what that raised."""
        if self._beside is not None:
            self._beside.result()


class AttendsOnceIn8Bits(DenseLayerIn8Bits):
    """Lets go of its rows once one query has attended to them."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        output = super().attend(call)
        del self._tensors, self._runs
        return output
