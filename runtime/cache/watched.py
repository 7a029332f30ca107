"""Queries that decode steps leave behind for the heads that point at an answer's sources."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from sparsekv.kernels.common.hook import AttentionCall


class WatchedQueries:
    """The queries of the last token of each sequence in a forward pass, of some heads of some layers.

    Each pass overwrites them. They lie side by side in one buffer [S, C], where C is the number of all heads' channels,
    so that one copy takes those of all layers. The buffer stays the same, so that a captured step writes to it, too.

    Args:
        heads: numbers [H] of the query heads that are watched, by layer.
        channels: the channels D of a layer's heads.
        slots: maximum number of sequences in a pass.
    """

    def __init__(self, heads: Mapping[int, torch.Tensor], channels: Mapping[int, int], slots: int):
        self.heads, self.slots = heads, slots
        edges = [*accumulate((len(some) * channels[layer] for layer, some in heads.items()), initial=0)]
        self._columns = {layer: slice(*of_layer) for layer, of_layer in zip(heads, pairwise(edges), strict=True)}
        self._channels, self._newest = edges[-1], torch.empty(0)

    def write(self, call: AttentionCall, last: torch.Tensor | slice) -> None:
        """Copy the queries of a layer's call at the indices `last` [B], one for each sequence."""
        heads = self.heads.get(call.layer)
        if heads is None:
            return
        found = call.query[heads][:, last].transpose(0, 1).flatten(1)
        if not len(self._newest):  # in a question's pass, which is not captured
            self._newest = found.new_zeros(self.slots, self._channels)
        self._newest[: len(found), self._columns[call.layer]] = found

    def of(self, places: Sequence[int]) -> Sequence[torch.Tensor]:
        """Return copies [C] of the queries of some of a pass's sequences, by their places in the pass."""
        return self._newest[torch.tensor(places, device=self._newest.device)].unbind()

    def of_layer(self, layer: int, steps: torch.Tensor) -> torch.Tensor:
        """Return a layer's queries [H, T, D] of T tokens, from the copies [T, C]."""
        of_layer = steps[:, self._columns[layer]]
        return of_layer.view(len(steps), len(self.heads[layer]), -1).transpose(0, 1)
