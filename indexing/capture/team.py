"""The processes that run a build's model: this one alone, or this one as the leader of others."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from sparsekv.formats.growing_file import ALL_HEADS, HeadPart
from sparsekv.formats.schema import LayerFacts, Probe
from sparsekv.formats.unfinished_file import SharedFile
from sparsekv.indexing.capture.capture import Capture, CapturedLayer, CapturedQueries


class Captured(Protocol):
    """What a build needs of a finished prefill; see `Capture`, which is one of a whole model."""

    @property
    def probe(self) -> Probe: ...

    def facts(self, layer: int) -> LayerFacts: ...

    def not_finite(self) -> str | None: ...

    def take(self, layer: int) -> CapturedLayer: ...

    def take_queries(self, layer: int) -> CapturedQueries: ...


class Team(ABC):
    """Is told before each run of the model, so that other processes run it too, and makes whole what each captured."""

    part: HeadPart
    """Which heads are those of the tensors that this process captures."""
    starts_after_prefix: bool
    """Whether a run can start after tokens whose keys and values the folder's index has."""

    @property
    def has_all_heads(self) -> bool:
        """Whether the tensors that this process captures are those of all heads."""
        return self.part == ALL_HEADS

    @abstractmethod
    def share_files(self, folder: Path, files: Mapping[str, SharedFile]) -> bool:
        """Whether each process will write its heads' rows of the next capture into these files of an index, by name.

        All processes can open them then, or none of them writes.
        """

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

    part, starts_after_prefix = ALL_HEADS, True

    def share_files(self, folder: Path, files: Mapping[str, SharedFile]) -> bool:
        return True

    def begin_capture(self, input_ids: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Nobody is to be told."""

    def whole(self, own: Capture) -> Captured:
        return own

    def begin_rotations(self, input_ids: torch.Tensor) -> None:
        """Nobody is to be told."""

    def release(self) -> None:
        """Nobody waits."""
