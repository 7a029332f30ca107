"""Meters: measure many settings on one half of the tail, and cache the results."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean

import torch

from sparsekv.formats.reader import CPU, Artifact
from sparsekv.runtime.cache.layer_rows import LayerRows
from sparsekv.runtime.reporting.measures import Measured
from sparsekv.runtime.reporting.queries import QueryBlock, tail_block
from sparsekv.runtime.reporting.recall import SharedStates, measure_layer
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.form import Form


@dataclass(frozen=True)
class Point:
    """Measures of a setting, means over KV heads and queries: KV fraction, recall, output error; and perplexity as a
    ratio to dense attention's. NaN for measures that the meter does not have."""

    kv_fraction: float
    recall: float = math.nan
    error: float = math.nan
    perplexity: float = math.nan


Shares = dict[int, float]
"""The budget of each indexed layer, by its number, as a share of the middle."""
Progress = Callable[[int, int], None]


class Meter(ABC):
    """Measures settings on one half of the tail."""

    @abstractmethod
    def measure(self, wanted: Iterable[tuple[Form, Shares]], progress: Progress) -> None:
        """Measure forms at each layer's share, unless that was measured before.

        Args:
            progress: called with the number done and the total.
        """

    @abstractmethod
    def mean(self, form: Form, shares: Shares) -> Point:
        """The measures of a setting, over all layers; it must have been measured."""


class AttentionMeter(Meter):
    """Measures each layer's attention against dense attention, on one half of the tail's queries.

    Args:
        reference: recall counts the oracle's best tokens at this budget.
        calibration: the tail's first half; False: the held-out second half.
        stride: measure every `stride`-th query.
        outputs: also measure the error of attention's output.
        device: where it is measured.
    """

    def __init__(
        self,
        artifact: Artifact,
        reference: Budget,
        *,
        calibration: bool,
        stride: int = 1,
        outputs: bool = True,
        device: torch.device = CPU,
    ):
        self.artifact, self.calibration, self.stride, self.device = artifact, calibration, stride, device
        self.reference, self.outputs = reference, outputs
        self.layers = artifact.manifest.indexed_layers
        self.shared: set[Form] = set()
        """Forms whose layers share state: these are measured on all layers or on none."""
        self._known: dict[tuple[Form, float, int], Point] = {}

    def measure(
        self, wanted: Iterable[tuple[Form, Shares]], progress: Progress, layers: Sequence[int] | None = None
    ) -> None:
        """Measure layer by layer; needs the memory of one layer.

        Args:
            progress: called with the number of layers done and the total.
            layers: measure only these layers, except for forms whose layers share state; None: all.
        """
        states, asked = SharedStates(), self.layers if layers is None else layers
        wanted = [(form, shares) for form, shares in wanted if not self._knows(form, shares, asked)]
        for done, layer in enumerate(self.layers, 1):
            here = []
            for form, shares in wanted:
                if states.get((form.name, form.variant)):
                    self.shared.add(form)
                if form in self.shared or (layer in asked and (form, shares[layer], layer) not in self._known):
                    here.append((form, shares[layer]))
            self._measure_layer(layer, list(dict.fromkeys(here)), states)
            progress(done, len(self.layers))

    def mean(self, form: Form, shares: Shares, layers: Sequence[int] | None = None) -> Point:
        """The mean of the measures over `layers`, all by default."""
        points = [self.at(form, shares[layer], layer) for layer in layers or self.layers]
        return Point(*(fmean(values) for values in zip(*map(astuple, points), strict=True)))

    def at(self, form: Form, share: float, layer: int) -> Point:
        """The measures of one layer."""
        return self._known[form, share, layer]

    def _knows(self, form: Form, shares: Shares, layers: Sequence[int]) -> bool:
        return all((form, shares[layer], layer) in self._known for layer in layers)

    def _measure_layer(self, layer: int, here: list[tuple[Form, float]], states: SharedStates) -> None:
        if not here:
            return
        measured = {self._measured(form, share): (form, share) for form, share in here}
        rows, blocks = LayerRows(self.artifact, layer), [self._block(layer)]
        for one, measures in measure_layer(rows, list(measured), blocks, states, self.device).items():
            means = {name: float(values.mean()) for name, values in measures.means().items()}
            point = Point(means["kv_fraction"], means["recall"], means["output_error"])
            self._known[*measured[one], layer] = point

    def _measured(self, form: Form, share: float) -> Measured:
        return Measured(form, Budget(share), reference=self.reference, outputs=self.outputs)

    def _block(self, layer: int) -> QueryBlock:
        block = tail_block(self.artifact, layer, calibration=self.calibration)
        return replace(block, queries=block.queries[:, :: self.stride], visible=block.visible[:: self.stride])
