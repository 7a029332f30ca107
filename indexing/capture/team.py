"""The processes that make an index: this one alone, or this one as the leader of others."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from sparsekv.formats.index.folder import SharedFile
from sparsekv.formats.index.growing_file import ALL_HEADS, HeadPart, RemoteSum
from sparsekv.formats.index.schema import KVDtype, LayerFacts
from sparsekv.indexing.capture.capture import Capture, CapturedLayer, CapturedQueries
from sparsekv.indexing.indexers.layer_work import BuildFiles, LayerWork, Tensors, make_layers


class Captured(Protocol):
    """The interface of a finished prefill; see `Capture`, which is one of a whole model."""

    def facts(self, layer: int) -> LayerFacts: ...

    def not_finite(self) -> str | None: ...

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def take(self, layer: int) -> CapturedLayer: ...


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
    def begin_preflight(self, input_ids: torch.Tensor) -> None:
        """A call of `preflight` over input_ids [N] follows."""

    @abstractmethod
    def begin_capture(self, input_ids: torch.Tensor, options: Mapping[str, Any]) -> None:
        """A call of `capture` follows, over input_ids [N] with these keyword arguments."""

    @abstractmethod
    def whole(self, own: Capture) -> Captured:
        """The capture of that call, with the heads of all processes."""

    @abstractmethod
    def begin_canary(self, input_ids: torch.Tensor, kv_dtype: KVDtype | None) -> None:
        """A call of `run_canary` over input_ids [N] follows, over each process's heads as `kv_dtype` stores them."""

    @abstractmethod
    def begin_rotations(self, input_ids: torch.Tensor) -> None:
        """A call of `measure_rotations` over input_ids [N] follows."""

    @abstractmethod
    def make_layers(
        self, work: LayerWork, layers: Sequence[int], files: BuildFiles, device: torch.device
    ) -> Generator[Tensors, None, None]:
        """As `LayerMaker`: what a method makes of layers, whichever process does the work."""

    @abstractmethod
    def release(self) -> None:
        """Nothing follows that the other processes take part in."""


class Alone(Team):
    """This process has the whole model."""

    part, shared_rows, starts_after_prefix = ALL_HEADS, None, True

    def begin_preflight(self, input_ids: torch.Tensor) -> None:
        """Nobody is to be told."""

    def begin_capture(self, input_ids: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Nobody is to be told."""

    def whole(self, own: Capture) -> Captured:
        return own

    def begin_canary(self, input_ids: torch.Tensor, kv_dtype: KVDtype | None) -> None:
        """Nobody is to be told."""

    def begin_rotations(self, input_ids: torch.Tensor) -> None:
        """Nobody is to be told."""

    def make_layers(
        self, work: LayerWork, layers: Sequence[int], files: BuildFiles, device: torch.device
    ) -> Generator[Tensors, None, None]:
        return make_layers(work, layers, files, device)

    def release(self) -> None:
        """Nobody waits."""
