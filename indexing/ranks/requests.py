"""What the first rank of a build asks of the others; it is sent to all of them before each thing that all do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RunPrompt:
    """Prefill input_ids [N] and keep what is captured; the options are keyword arguments of `capture`."""

    input_ids: torch.Tensor
    options: Mapping[str, Any]


@dataclass(frozen=True)
class CheckNumbers:
    """Tell whether all captured numbers are finite."""


@dataclass(frozen=True)
class MeasureRotations:
    """Run the passes of `measure_rotations` over input_ids [N]."""

    input_ids: torch.Tensor


@dataclass(frozen=True)
class SendLayer:
    """Send what was captured of a layer, and drop it."""

    layer: int


@dataclass(frozen=True)
class End:
    """The build needs the model no more."""


Request = RunPrompt | CheckNumbers | MeasureRotations | SendLayer | End
