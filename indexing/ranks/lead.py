"""The first rank of a build: it writes and indexes, and has the others run the model with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsekv.formats.growing_file import ALL_HEADS, HeadPart
from sparsekv.formats.ranks.ranks import Ranks
from sparsekv.formats.schema import LayerFacts, Probe
from sparsekv.formats.unfinished_file import SharedFile
from sparsekv.indexing.capture.capture import Capture, CapturedLayer, CapturedQueries
from sparsekv.indexing.capture.team import Captured, Team
from sparsekv.indexing.ranks.joined_layer import join_layer, join_queries
from sparsekv.indexing.ranks.requests import (
    CheckNumbers,
    End,
    EndLayer,
    MeasureRotations,
    Request,
    RunPrompt,
    SendLayer,
    ShareFiles,
)


class Leader(Team):
    """Asks the other ranks for each run of the model, and for the heads that they captured.

    Args:
        split: whether each rank captures heads of its own; False: all capture all heads.
    """

    starts_after_prefix = False  # only this rank could read the prefix's rows

    def __init__(self, ranks: Ranks, *, split: bool):
        self.ranks, self.part = ranks, HeadPart(ranks.number, ranks.size) if split else ALL_HEADS

    def share_files(self, folder: Path, files: Mapping[str, SharedFile]) -> bool:
        self._ask(ShareFiles(folder, files))
        return all(self.ranks.collect(True))

    def begin_capture(self, input_ids: torch.Tensor, options: Mapping[str, Any]) -> None:
        self._ask(RunPrompt(input_ids, options))

    def whole(self, own: Capture) -> Captured:
        return own if self.has_all_heads else JoinedCapture(self.ranks, own)

    def begin_rotations(self, input_ids: torch.Tensor) -> None:
        self._ask(MeasureRotations(input_ids))

    def release(self) -> None:
        self._ask(End())

    def _ask(self, request: Request) -> None:
        self.ranks.share(request)


@dataclass(frozen=True)
class JoinedCapture:
    """A capture whose layers come from all ranks, one layer at a time."""

    ranks: Ranks
    own: Capture

    @property
    def probe(self) -> Probe:
        return self.own.probe

    def facts(self, layer: int) -> LayerFacts:
        return self.own.facts(layer)

    def not_finite(self) -> str | None:
        """The first tensor of any rank with an infinity or NaN; None if all are finite."""
        self.ranks.share(CheckNumbers())
        return next((wrong for wrong in self.ranks.collect(self.own.not_finite()) if wrong), None)

    def take(self, layer: int) -> CapturedLayer:
        self.ranks.share(SendLayer(layer))
        joined = join_layer(self.ranks, self.own.take(layer))
        assert joined is not None
        return joined

    def take_queries(self, layer: int) -> CapturedQueries:
        """Once it returns, no other rank writes to the layer's file, or has it open."""
        self.ranks.share(EndLayer(layer))
        # What they send is no sign of that: on a GPU it may be received after this process has gone on.
        self.ranks.wait_for_all(lambda seconds: True)
        joined = join_queries(self.ranks, self.own.take_queries(layer))
        assert joined is not None
        return joined
