"""Measuring many settings on one half of the tail, and remembering what was measured."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean

from sparsekv.formats.reader import Artifact
from sparsekv.runtime.reporting.queries import QueryBlock, tail_block
from sparsekv.runtime.reporting.recall import Measured, SharedStates, measure_layer
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.form import Form


@dataclass(frozen=True)
class Point:
    """What was measured, mean over KV heads and queries: KV fraction, recall, error of the output; and perplexity, in
    terms of dense attention's. NaN what a meter does not measure."""

    kv_fraction: float
    recall: float = math.nan
    error: float = math.nan
    perplexity: float = math.nan


Shares = dict[int, float]
"""The budget of each indexed layer, by its number, as a share of the middle."""
Progress = Callable[[int, int], None]


class Meter(ABC):
    """One half of the tail, and what was measured on it."""

    @abstractmethod
    def measure(self, wanted: Iterable[tuple[Form, Shares]], progress: Progress) -> None:
        """Measure forms at each layer's share, where that is not known yet.

        Args:
            progress: called with what is done and what there is in all.
        """

    @abstractmethod
    def mean(self, form: Form, shares: Shares) -> Point:
        """What was measured, over all layers."""


class AttentionMeter(Meter):
    """Each layer's attention against the dense one, on one half of the tail's queries.

    Args:
        reference: the budget whose best tokens recall is of.
        stride: every so many queries one is measured on.
        outputs: measure the error of attention's output too.
    """

    def __init__(
        self, artifact: Artifact, reference: Budget, *, calibration: bool, stride: int = 1, outputs: bool = True
    ):
        self.artifact, self.calibration, self.stride = artifact, calibration, stride
        self.reference, self.outputs = reference, outputs
        self.layers = artifact.manifest.indexed_layers
        self.shared: set[Form] = set()
        """Forms whose layers leave something for one another: all of these have to be measured, or none."""
        self._known: dict[tuple[Form, float, int], Point] = {}

    def measure(
        self, wanted: Iterable[tuple[Form, Shares]], progress: Progress, layers: Sequence[int] | None = None
    ) -> None:
        """Measure layer by layer; memory is one layer's.

        Args:
            progress: called with layers done and layers in all.
            layers: measure on these alone, but for forms whose layers depend on one another.
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
        """The mean over layers, all by default, of what was measured."""
        points = [self.at(form, shares[layer], layer) for layer in layers or self.layers]
        return Point(*(fmean(values) for values in zip(*map(astuple, points), strict=True)))

    def at(self, form: Form, share: float, layer: int) -> Point:
        """What was measured on one layer."""
        return self._known[form, share, layer]

    def _knows(self, form: Form, shares: Shares, layers: Sequence[int]) -> bool:
        return all((form, shares[layer], layer) in self._known for layer in layers)

    def _measure_layer(self, layer: int, here: list[tuple[Form, float]], states: SharedStates) -> None:
        if not here:
            return
        measured = {self._measured(form, share): (form, share) for form, share in here}
        for one, measures in measure_layer(self.artifact, layer, list(measured), [self._block(layer)], states).items():
            means = {name: float(values.mean()) for name, values in measures.means().items()}
            point = Point(means["kv_fraction"], means["recall"], means["output_error"])
            self._known[*measured[one], layer] = point

    def _measured(self, form: Form, share: float) -> Measured:
        return Measured(form, Budget(share), reference=self.reference, outputs=self.outputs)

    def _block(self, layer: int) -> QueryBlock:
        block = tail_block(self.artifact, layer, calibration=self.calibration)
        return replace(block, queries=block.queries[:, :: self.stride], visible=block.visible[:: self.stride])
