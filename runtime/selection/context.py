"""The input of `Method.prepare`: one layer of a stored context, and the tensors that the indexer built for it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from sparsekv.formats.schema import LayerFacts
from sparsekv.kernels.common.eight_bits import RowsOf8Bits


@dataclass(frozen=True)
class LayerPosition:
    """A layer's number among the indexed layers, counted from 0, and how many there are.

    `shared` is state shared by all layers of one cache or report: later layers read what earlier ones write under a
    method's name.
    """

    number: int = 0
    layers: int = 1
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MiddleContext:
    """One layer's middle, its attention settings, and the tensors, calibration and parameters of a method's indexer.

    `load_keys()` and `load_values()` read keys and values [Hk, M, D], in order of position, to the device of `tensors`;
    `load_observed()` reads the queries [Hk, G, W, D] of the tail's first half there: a method may learn from them, for
    reports measure on the second half. Positions in `token_order` are counted from the first middle token, whose own
    position in the prompt is `first_token`; those of other tensors are as the indexer gave them. `centroids_in_8_bits`:
    those of the finest clusters as kernels may read them, where they are stored so; `tensors` has what they mean.
    """

    load_keys: Callable[[], torch.Tensor]
    load_values: Callable[[], torch.Tensor]
    load_observed: Callable[[], torch.Tensor]
    facts: LayerFacts
    tensors: dict[str, torch.Tensor]
    calibration: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    first_token: int = 0
    position: LayerPosition = field(default_factory=LayerPosition)
    centroids_in_8_bits: RowsOf8Bits | None = None

    @cached_property
    def keys(self) -> torch.Tensor:
        """[Hk, M, D], read at first use and cached."""
        return self.load_keys()
