"""Moves the oldest exact tokens into a selector's index while a model answers."""

import torch

from sparsekv.formats.errors import SparsekvError
from sparsekv.runtime.attention.prefetch import Prefetcher
from sparsekv.runtime.cache.kv_store import MiddleRows, Pair
from sparsekv.runtime.cache.read_rows import ReadRows
from sparsekv.runtime.cache.stored_layer import StoredLayer
from sparsekv.runtime.selection.capabilities import Appendable


class Appender:
    """Moves one layer's tokens from its exact rows to the middle and the selector's index.

    `torn` is True while rows move, and stays so where that was interrupted: index and rows may not fit then.

    Args:
        sinks: how many of the first exact rows are sinks, which never move.
        device: the selector's.
        prefetcher: its pending search is discarded at each append, because the index changes.
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
        self.torn = False

    def append_due(self, layer: StoredLayer) -> None:
        """Append the oldest rows after the sinks, `append_size` at a time, until fewer than twice as many are left."""
        size, start = self.selector.append_size, self.sinks
        if layer.used - start < 2 * size:
            return
        self.torn = True
        keys, values = layer.exact_rows()
        moved = ((layer.used - start) // size - 1) * size
        for first in range(start, start + moved, size):
            self._append((keys[:, first : first + size], values[:, first : first + size]))
        for rows in (keys, values):
            rows[:, start : layer.used - moved] = rows[:, start + moved :].clone()
        layer.used, layer.stored = layer.used - moved, layer.stored + moved
        self.torn = False

    def _append(self, new: Pair) -> None:
        if self.prefetcher is not None:
            self.prefetcher.forget()
        start = self.selector.open_row
        keys, values = (torch.cat(pair, 1) for pair in zip(self.middle.from_row(start), new, strict=True))
        appended = self.selector.append(keys.to(self.device), values.to(self.device))
        self.middle.rewrite(start, new, appended.order)
        self.read.known += len(keys) * (appended.index_rows + 2 * keys.shape[1])

    @torch.inference_mode()
    def remove_appended(self, layer: StoredLayer, tokens: int, exact: Pair) -> None:
        """Restore the stored index, and the layer's stored tokens and exact rows [Hk, E, D] that belong to it.

        Raises:
            SparsekvError: an earlier call, or an append, was interrupted in the middle.
        """
        # In inference mode: rows that grew while a model decoded are inference tensors, writable in no other mode.
        if self.torn:
            raise SparsekvError(
                "an answer was interrupted while its tokens moved into the index, and cannot be undone; ask with a new "
                "asker"
            )
        self.torn = True
        order = self.selector.remove_appended()
        if order is not None:
            self.middle.rewrite(self.selector.open_row, None, order)
            layer.stored = tokens
            for rows, first in zip(layer.exact_rows(), exact, strict=True):
                rows.copy_(first)
        self.torn = False
