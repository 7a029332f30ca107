"""Measuring many settings on the tail's queries, layer by layer, and remembering what was measured."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean

from sparsekv.formats.reader import Artifact
from sparsekv.runtime.budget import Budget
from sparsekv.runtime.methods import Method
from sparsekv.runtime.queries import QueryBlock, tail_block
from sparsekv.runtime.recall import Boards, Measured, measure_layer


@dataclass(frozen=True)
class Form:
    """A method with its parameters: a setting but for its budget. `variant` is the form's name among the method's."""

    name: str
    variant: str
    method: Method
    residual: bool


@dataclass(frozen=True)
class Goal:
    """What a setting is to hold: recall of at least `value`, or output error of at most."""

    measure: str
    value: float

    def of(self, point: "Point") -> float:
        """What this goal is about."""
        return point.recall if self.measure == "recall" else point.error

    def gain(self, value: float) -> float:
        """More is better, whatever is measured."""
        return value if self.measure == "recall" else -value

    @property
    def tolerance(self) -> float:
        """How far below a target a gain on other queries may lie: 0.02 of recall, a tenth of an error."""
        return 0.02 if self.measure == "recall" else 0.1 * self.value


@dataclass(frozen=True)
class Point:
    """What was measured, mean over KV heads and queries: recall, error of the output, and the KV fraction."""

    recall: float
    error: float
    kv_fraction: float


Shares = dict[int, float]
"""The budget of each indexed layer, by its number, as a share of the middle."""


class Meter:
    """One half of the tail's queries and what was measured on them; every `stride`-th query alone if asked."""

    def __init__(self, artifact: Artifact, *, calibration: bool, stride: int = 1):
        self.artifact, self.calibration, self.stride = artifact, calibration, stride
        self.layers = artifact.manifest.indexed_layers
        self.shared: set[Form] = set()
        """Forms whose layers leave something for one another: all of these have to be measured, or none."""
        self._known: dict[tuple[Form, float, int], Point] = {}

    def measure(
        self,
        wanted: Iterable[tuple[Form, Shares]],
        progress: Callable[[int, int], None],
        layers: Sequence[int] | None = None,
    ) -> None:
        """Measure forms at each layer's share, where that is not known yet.

        Args:
            progress: called with layers done and layers in all.
            layers: measure on these alone, but for forms whose layers depend on one another.
        """
        wanted, boards = list(wanted), Boards()
        for done, layer in enumerate(self.layers, 1):
            here = []
            for form, shares in wanted:
                if boards.get((form.name, form.variant)):
                    self.shared.add(form)
                asked = layers is None or layer in layers or form in self.shared
                if asked and (form in self.shared or (form, shares[layer], layer) not in self._known):
                    here.append((form, shares[layer]))
            self._measure_layer(layer, list(dict.fromkeys(here)), boards)
            progress(done, len(self.layers))

    def mean(self, form: Form, shares: Shares, layers: Sequence[int] | None = None) -> Point:
        """The mean over layers, all by default, of what was measured."""
        points = [self.at(form, shares[layer], layer) for layer in layers or self.layers]
        return Point(*(fmean(values) for values in zip(*map(astuple, points), strict=True)))

    def at(self, form: Form, share: float, layer: int) -> Point:
        """What was measured on one layer."""
        return self._known[form, share, layer]

    def _measure_layer(self, layer: int, here: list[tuple[Form, float]], boards: Boards) -> None:
        if not here:
            return
        measured = {
            Measured(form.name, form.variant, form.method, Budget(share), form.residual): (form, share)
            for form, share in here
        }
        for one, measures in measure_layer(self.artifact, layer, list(measured), [self._block(layer)], boards).items():
            means = measures.means()
            names = ("recall", "output_error", "kv_fraction")
            self._known[*measured[one], layer] = Point(*(float(means[name].mean()) for name in names))

    def _block(self, layer: int) -> QueryBlock:
        block = tail_block(self.artifact, layer, calibration=self.calibration)
        return replace(block, queries=block.queries[:, :: self.stride], visible=block.visible[:: self.stride])
