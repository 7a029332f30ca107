"""Handing the oldest exact tokens of an answer to a selector that takes them into its index."""

import torch

from sparsekv.runtime.attention.prefetch import Prefetcher
from sparsekv.runtime.cache.kv_store import MiddleRows, Pair
from sparsekv.runtime.cache.read_rows import ReadRows
from sparsekv.runtime.cache.stored_layer import StoredLayer
from sparsekv.runtime.selection.capabilities import Appendable


class Appender:
    """One layer's tokens on their way from the exact rows to the middle.

    Args:
        sinks: the first exact rows, which always stay.
        device: where the selector is.
        prefetcher: what it has found is of no use once the index has changed.
    """

    def __init__(
        self,
        selector: Appendable,
        middle: MiddleRows,
        sinks: int,
        read: ReadRows,
        device: torch.device,
        prefetcher: Prefetcher | None,
    ):
        self.selector, self.middle, self.sinks, self.read = selector, middle, sinks, read
        self.device, self.prefetcher = device, prefetcher

    def append_due(self, layer: StoredLayer) -> None:
        """Leave the newest rows exact, fewer than twice what is appended at a time, and append those before."""
        size, start = self.selector.append_size, self.sinks
        if layer.used - start < 2 * size:
            return
        keys, values = layer.exact_rows()
        moved = ((layer.used - start) // size - 1) * size
        for first in range(start, start + moved, size):
            self._append((keys[:, first : first + size], values[:, first : first + size]))
        for rows in (keys, values):
            rows[:, start : layer.used - moved] = rows[:, start + moved :].clone()
        layer.used, layer.stored = layer.used - moved, layer.stored + moved

    def _append(self, new: Pair) -> None:
        if self.prefetcher is not None:
            self.prefetcher.forget()
        start = self.selector.open_row
        keys, values = (torch.cat(pair, 1) for pair in zip(self.middle.from_row(start), new, strict=True))
        appended = self.selector.append(keys.to(self.device), values.to(self.device))
        self.middle.rewrite(start, new, appended.order)
        self.read.known += len(keys) * (appended.index_rows + 2 * keys.shape[1])

    @torch.inference_mode()
    def remove_appended(self) -> bool:
        """Back to the stored index; whether anything had been appended."""
        # In inference mode, because rows that grew while a model decoded may be written in no other.
        order = self.selector.remove_appended()
        if order is None:
            return False
        self.middle.rewrite(self.selector.open_row, None, order)
        return True
