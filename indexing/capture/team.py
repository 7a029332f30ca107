"""The processes that build an index: this process alone, or this process as the leader of others."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from sparsekv.formats.index.context_rows import Pair
from sparsekv.formats.index.folder import SharedFile
from sparsekv.formats.index.growing_file import ALL_HEADS, HeadPart, RemoteSum
from sparsekv.formats.index.schema import KVDtype, LayerFacts
from sparsekv.formats.index.writer import ArtifactWriter
from sparsekv.indexing.capture.capture import Capture, CapturedLayer, CapturedQueries
from sparsekv.indexing.indexers.interface import Tensors
from sparsekv.indexing.indexers.layer_work import LayerWork, make_layers
from sparsekv.kernels.common.states import State


class Captured(Protocol):
    """The interface of a finished prefill; `Capture` is its implementation for one process with the whole model."""

    @property
    def states(self) -> Mapping[int, State]: ...

    def facts(self, layer: int) -> LayerFacts: ...

    def not_finite(self) -> str | None: ...

    def rows(self, layer: int) -> Pair: ...

    def take(self, layer: int) -> CapturedLayer: ...


@dataclass(frozen=True)
class TryModel:
    """Run the passes of `preflight` over input_ids [N]."""

    input_ids: torch.Tensor


@dataclass(frozen=True)
class RunPrompt:
    """Prefill input_ids [N] and hold the captured rows for later requests; `options` are arguments of `capture`."""

    input_ids: torch.Tensor
    options: Mapping[str, Any]


@dataclass(frozen=True)
class RunCanary:
    """Run the passes of `run_canary` over input_ids [N] and the captured rows, rounded as `kv_dtype` stores them."""

    input_ids: torch.Tensor
    kv_dtype: KVDtype | None


@dataclass(frozen=True)
class MeasureRotations:
    """Run the passes of `measure_rotations` over input_ids [N]."""

    input_ids: torch.Tensor


ModelRun = TryModel | RunPrompt | RunCanary | MeasureRotations
"""A run of the model. All processes that share the model must start it together."""


class SharedRows(ABC):
    """Lets processes, each of which captures a part of the heads, write their rows to the same files of an index."""

    @abstractmethod
    def share(self, folder: Path, files: Mapping[str, SharedFile]) -> bool:
        """Let all processes open an index's files, given by name; return whether every process could open all files.

        If so, every process writes its heads' rows of the next capture to these files.
        """

    @abstractmethod
    def end(self, layer: int, written: Callable[[float], bool]) -> tuple[CapturedQueries, RemoteSum | None]:
        """Wait until all processes have written a layer's rows, and free the captured rows.

        Args:
            written: waits for a number of seconds, and returns whether this process has written its rows.

        Returns:
            The layer's queries, and a function that waits for the checksum of the layer's file from another process.
            Instead of the function, None if this process computes the checksum, or if the file is reused and has one.
        """


class Team(ABC):
    """The processes that run the model. Starts each run in all processes, and joins the heads that they capture."""

    part: HeadPart
    """Part of the heads that this process captures."""
    shared_rows: SharedRows | None
    """Lets the processes write their heads' rows to the same files. None if each process captures all heads, and this
    process writes all rows."""
    starts_after_prefix: bool
    """Whether a prefill can start after tokens whose keys and values the index in the build's folder has."""

    @property
    def has_all_heads(self) -> bool:
        """Whether this process captures all heads."""
        return self.part == ALL_HEADS

    @abstractmethod
    def begin(self, run: ModelRun) -> None:
        """Start a run of the model in the other processes; called just before this process makes the same run."""

    @abstractmethod
    def whole(self, own: Capture) -> Captured:
        """Return this process's capture, joined with the heads that other processes have captured."""

    @abstractmethod
    def make_layers(
        self, work: LayerWork, layers: Sequence[int], files: ArtifactWriter, device: torch.device
    ) -> Generator[Tensors, None, None]:
        """Yield a method's tensors of layers, built by this process or others; a `LayerMaker`."""

    @abstractmethod
    def release(self) -> None:
        """Let the other processes end, because this process needs no more work from them."""


class Alone(Team):
    """Team of this process alone, which has the whole model."""

    part, shared_rows, starts_after_prefix = ALL_HEADS, None, True

    def begin(self, run: ModelRun) -> None:
        """Do nothing: there are no other processes."""

    def whole(self, own: Capture) -> Captured:
        return own

    def make_layers(
        self, work: LayerWork, layers: Sequence[int], files: ArtifactWriter, device: torch.device
    ) -> Generator[Tensors, None, None]:
        return make_layers(work, layers, files, device)

    def release(self) -> None:
        """Do nothing: no other process waits."""
