"""Record the queries of the retrieval heads in each forward pass, to compute an answer's sources from them."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from sparsekv.kernels.common.hook import AttentionCall


class WatchedQueries:
    """Buffer of the retrieval heads' queries for the last token of each sequence in a forward pass.

    Each pass overwrites the buffer [slots, C]: a row for each sequence, with the C channels of all retrieval heads of
    all layers. One buffer serves all layers, so that one copy reads the queries of all layers. The buffer is allocated
    in the first pass and never replaced, so that CUDA graphs of decode steps can write to it.

    Args:
        heads: for each layer, the indices [H] of its H retrieval heads among the query heads.
        channels: for each layer, the number of channels D of a head.
        slots: maximum number of sequences in a pass.

    Attributes:
        sinks: for each layer of the first pass, the learned sink logits [H] of its retrieval heads; None without them.
    """

    def __init__(self, heads: Mapping[int, torch.Tensor], channels: Mapping[int, int], slots: int):
        self.heads, self.slots = heads, slots
        self.sinks: dict[int, torch.Tensor | None] = {}
        edges = [*accumulate((len(some) * channels[layer] for layer, some in heads.items()), initial=0)]
        self._columns = {layer: slice(*of_layer) for layer, of_layer in zip(heads, pairwise(edges), strict=True)}
        self._channels, self._newest = edges[-1], torch.empty(0)

    def write(self, call: AttentionCall, last: torch.Tensor | slice) -> None:
        """Store the queries of each sequence's last token in a layer's attention call.

        `last` [B] are the indices of these tokens in the call. Does nothing for a layer without retrieval heads.
        """
        heads = self.heads.get(call.layer)
        if heads is None:
            return
        found = call.query[heads][:, last].transpose(0, 1).flatten(1)
        if not len(self._newest):  # first pass: it feeds a question, and such a pass is never captured as a CUDA graph
            self._newest = found.new_zeros(self.slots, self._channels)
        if call.layer not in self.sinks:
            self.sinks[call.layer] = None if call.sink_logits is None else call.sink_logits[heads]
        self._newest[: len(found), self._columns[call.layer]] = found

    def of(self, places: Sequence[int]) -> Sequence[torch.Tensor]:
        """Return a copy of each sequence's queries: C numbers, the queries of all watched heads one after another.

        `places` are the sequences' row indices in the last pass.
        """
        return self._newest[torch.tensor(places, device=self._newest.device)].unbind()

    def of_layer(self, layer: int, steps: torch.Tensor) -> torch.Tensor:
        """Return a layer's queries [H, T, D] from `steps` [T, C], the queries of T tokens as `of` returns them."""
        of_layer = steps[:, self._columns[layer]]
        return of_layer.view(len(steps), len(self.heads[layer]), -1).transpose(0, 1)
