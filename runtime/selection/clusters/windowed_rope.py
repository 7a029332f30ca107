"""Windowed RoPE: clusters looked up as if every key stood at one distance from the query (A2ATS, arXiv 2502.12665)."""

from dataclasses import dataclass
from typing import Self

import torch

from sparsekv.kernels.common.rotation import rotate
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.queries import Queries


@dataclass(frozen=True)
class WindowedRope:
    """How a layer turns its rows (frequencies [P] float32), the distance, and where the middle's first token stands."""

    frequencies: torch.Tensor
    interleaved: bool
    distance: int
    first_token: int

    @classmethod
    def of_layer(cls, context: MiddleContext, distance: int) -> Self:
        """For a layer that was clustered with RoPE undone, of which it is therefore known how it turns its keys."""
        rope = context.facts.rope
        assert rope is not None
        frequencies = torch.tensor(rope.frequencies, device=context.tensors["token_order"].device)
        return cls(frequencies, rope.interleaved, distance, context.first_token)

    def query(self, queries: Queries) -> torch.Tensor:
        """The queries [Hk, G, Q, D], turned from where they stand to the distance from position 0."""
        turned = rotate(queries.query, self.distance - queries.positions(), self.frequencies, self.interleaved)
        return turned.to(queries.query.dtype)

    def undo(self, keys: torch.Tensor, first: int) -> torch.Tensor:
        """Keys [Hk, T, D] of the middle's tokens from `first` on, as they would be at position 0; float32."""
        start = self.first_token + first
        positions = torch.arange(start, start + keys.shape[1], device=keys.device)
        return rotate(keys, -positions, self.frequencies, self.interleaved)
