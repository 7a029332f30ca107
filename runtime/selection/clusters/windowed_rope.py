"""Windowed RoPE: clusters are scored as if all keys were at one distance from the query (A2ATS, arXiv 2502.12665)."""

from dataclasses import dataclass
from typing import Self

import torch

from sparsekv.kernels.common.rotation import rotate
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.queries import Queries


@dataclass(frozen=True)
class WindowedRope:
    """A layer's RoPE (frequencies [P] float32), the lookup distance, and the position of the middle's first token."""

    frequencies: torch.Tensor
    interleaved: bool
    distance: int
    first_token: int

    @classmethod
    def of_layer(cls, context: MiddleContext, distance: int) -> Self:
        """For a layer whose keys were clustered with RoPE undone; the index then has its RoPE frequencies."""
        rope = context.facts.rope
        if rope is None:
            raise ValueError("the layer has no RoPE frequencies")
        frequencies = torch.tensor(rope.frequencies, dtype=torch.float32, device=context.tensors["token_order"].device)
        return cls(frequencies, rope.interleaved, distance, context.first_token)

    def query(self, queries: Queries) -> torch.Tensor:
        """The queries [Hk, G, Q, D], rotated from their own positions to position `distance`."""
        turned = rotate(queries.query, self.distance - queries.positions(), self.frequencies, self.interleaved)
        return turned.to(queries.query.dtype)

    def undo(self, keys: torch.Tensor, first: int) -> torch.Tensor:
        """Keys [Hk, T, D] of the middle's tokens from `first` on, rotated back to position 0; float32."""
        start = self.first_token + first
        positions = torch.arange(start, start + keys.shape[1], device=keys.device)
        return rotate(keys, -positions, self.frequencies, self.interleaved)
