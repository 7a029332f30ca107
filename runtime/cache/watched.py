"""Queries that decode steps leave behind for the heads that point at an answer's sources."""

from collections.abc import Mapping

import torch

from sparsekv.kernels.common.hook import AttentionCall

LayerQueries = dict[int, torch.Tensor]
"""The queries of one token, [H, D] by layer, of H heads that are watched."""


class WatchedQueries:
    """The queries of the last token of each sequence in a forward pass, of some heads, [S, H, D] by layer.

    Each pass overwrites them. The buffers stay the same, so that a captured step writes to them, too.

    Args:
        heads: numbers [H] of the query heads that are watched, by layer.
        slots: maximum number of sequences in a pass.
    """

    def __init__(self, heads: Mapping[int, torch.Tensor], slots: int):
        self.heads, self.slots = heads, slots
        self._newest: LayerQueries = {}

    def write(self, call: AttentionCall, last: torch.Tensor | slice) -> None:
        """Copy the queries of a layer's call at the indices `last` [B], one for each sequence."""
        heads = self.heads.get(call.layer)
        if heads is None:
            return
        found = call.query[heads][:, last].transpose(0, 1)
        if call.layer not in self._newest:  # by a question's pass, which is not captured
            self._newest[call.layer] = found.new_zeros(self.slots, *found.shape[1:])
        self._newest[call.layer][: len(found)] = found

    def of(self, place: int) -> LayerQueries:
        """Return copies of the queries of a pass's sequence, by its place in the pass."""
        return {layer: rows[place].clone() for layer, rows in self._newest.items()}
