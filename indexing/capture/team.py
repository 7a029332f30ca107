"""The processes that make an index: this one alone, or this one as the leader of others."""

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


class Captured(Protocol):
    """The interface of a finished prefill; see `Capture`, which is one of a whole model."""

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
    """Prefill input_ids [N] and keep what is captured; the options are keyword arguments of `capture`."""

    input_ids: torch.Tensor
    options: Mapping[str, Any]


@dataclass(frozen=True)
class RunCanary:
    """Run the passes of `run_canary` over input_ids [N] and what was captured, as `kv_dtype` stores it."""

    input_ids: torch.Tensor
    kv_dtype: KVDtype | None


@dataclass(frozen=True)
class MeasureRotations:
    """Run the passes of `measure_rotations` over input_ids [N]."""

    input_ids: torch.Tensor


ModelRun = TryModel | RunPrompt | RunCanary | MeasureRotations
"""A run of the model that all processes which share it make together."""


class SharedRows(ABC):
    """How processes that each captured some heads write these into the same files of an index."""

    @abstractmethod
    def share(self, folder: Path, files: Mapping[str, SharedFile]) -> bool:
        """Whether each process will write its heads' rows of the next capture into these files of an index, by name.

        All processes can open them then, or none of them writes.
        """

    @abstractmethod
    def end(self, layer: int, written: Callable[[float], bool]) -> tuple[CapturedQueries, RemoteSum | None]:
        """Wait until all have written a layer's rows, and drop what was captured of it.

        Args:
            written: waits for so many seconds, and says whether this process has.

        Returns:
            the layer's queries, and what waits for the sum of its file.
        """


class Team(ABC):
    """Is told before each run of the model, so that other processes run it too, and makes whole what each captured."""

    part: HeadPart
    """Which heads are those of the tensors that this process captures."""
    shared_rows: SharedRows | None
    """How the processes write rows together; None where each captures all heads, and this one writes them."""
    starts_after_prefix: bool
    """Whether a run can start after tokens whose keys and values the folder's index has."""

    @property
    def has_all_heads(self) -> bool:
        """Whether the tensors that this process captures are those of all heads."""
        return self.part == ALL_HEADS

    @abstractmethod
    def begin(self, run: ModelRun) -> None:
        """This process makes this run next."""

    @abstractmethod
    def whole(self, own: Capture) -> Captured:
        """A capture of this process with the heads of all processes."""

    @abstractmethod
    def make_layers(
        self, work: LayerWork, layers: Sequence[int], files: ArtifactWriter, device: torch.device
    ) -> Generator[Tensors, None, None]:
        """As `LayerMaker`: what a method makes of layers, whichever process does the work."""

    @abstractmethod
    def release(self) -> None:
        """Nothing follows that the other processes take part in."""


class Alone(Team):
    """This process has the whole model."""

    part, shared_rows, starts_after_prefix = ALL_HEADS, None, True

    def begin(self, run: ModelRun) -> None:
        """Nobody is to be told."""

    def whole(self, own: Capture) -> Captured:
        return own

    def make_layers(
        self, work: LayerWork, layers: Sequence[int], files: ArtifactWriter, device: torch.device
    ) -> Generator[Tensors, None, None]:
        return make_layers(work, layers, files, device)

    def release(self) -> None:
        """Nobody waits."""
