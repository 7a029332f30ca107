"""What the first rank of a build asks of the others; it is sent to all of them before each thing that all do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsekv.formats.kv_storage import KVDtype
from sparsekv.formats.unfinished_file import SharedFile
from sparsekv.indexing.indexers.layer_work import LayerWork


@dataclass(frozen=True)
class ShareFiles:
    """Open files of the context in an index's folder, by name, and tell whether that worked. Where it did for all
    ranks, each writes its heads' rows into them while the prompt that follows is prefilled."""

    folder: Path
    files: Mapping[str, SharedFile]


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
class CheckNumbers:
    """Tell whether all captured numbers are finite."""


@dataclass(frozen=True)
class RunCanary:
    """Run the passes of `run_canary` over input_ids [N] and what was captured, as `kv_dtype` stores it."""

    input_ids: torch.Tensor
    kv_dtype: KVDtype | None


@dataclass(frozen=True)
class MeasureRotations:
    """Run the passes of `measure_rotations` over input_ids [N]."""

    input_ids: torch.Tensor


@dataclass(frozen=True)
class SendLayer:
    """Send what was captured of a layer, and drop it."""

    layer: int


@dataclass(frozen=True)
class EndLayer:
    """Tell once a layer's rows are in its file, send what else was captured of it, and drop all; the rank `summed_by`
    then sends the file's sum from a thread. The first one does it by itself, where that is needed at all."""

    layer: int
    summed_by: int


@dataclass(frozen=True)
class MakeLayers:
    """Tell whether all files that the work on these layers reads can be read: by what finds them, or as files whose
    rows this rank has ended. If so for all ranks, make the layers that are this rank's turns, and send them."""

    work: LayerWork
    layers: Sequence[int]
    folder: Path
    found: Mapping[str, SharedFile]


@dataclass(frozen=True)
class End:
    """The build needs this rank no more."""


Request = (
    ShareFiles
    | TryModel
    | RunPrompt
    | CheckNumbers
    | RunCanary
    | MeasureRotations
    | SendLayer
    | EndLayer
    | MakeLayers
    | End
)
