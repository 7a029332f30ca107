"""The processes that run a build's model: this one alone, or this one as the leader of others."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from sparsekv.formats.schema import LayerFacts, Probe
from sparsekv.indexing.capture.capture import Capture, CapturedLayer


class Captured(Protocol):
    """What a build needs of a finished prefill; see `Capture`, which is one of a whole model."""

    @property
    def probe(self) -> Probe: ...

    def facts(self, layer: int) -> LayerFacts: ...

    def not_finite(self) -> str | None: ...

    def take(self, layer: int) -> CapturedLayer: ...


class Team(ABC):
    """Is told before each run of the model, so that other processes run it too, and makes whole what each captured."""

    has_all_heads: bool
    """Whether the tensors that this process captures are those of all heads."""
    starts_after_prefix: bool
    """Whether a run can start after tokens whose keys and values the folder's index has."""

    @abstractmethod
    def begin_capture(self, input_ids: torch.Tensor, options: Mapping[str, Any]) -> None:
        """A call of `capture` follows, over input_ids [N] with these keyword arguments."""

    @abstractmethod
    def whole(self, own: Capture) -> Captured:
        """What that call captured, with the heads of all processes."""

    @abstractmethod
    def begin_rotations(self, input_ids: torch.Tensor) -> None:
        """A call of `measure_rotations` over input_ids [N] follows."""

    @abstractmethod
    def release(self) -> None:
        """No run follows."""


class Alone(Team):
    """This process has the whole model."""

    has_all_heads, starts_after_prefix = True, True

    def begin_capture(self, input_ids: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Nobody is to be told."""

    def whole(self, own: Capture) -> Captured:
        return own

    def begin_rotations(self, input_ids: torch.Tensor) -> None:
        """Nobody is to be told."""

    def release(self) -> None:
        """Nobody waits."""
