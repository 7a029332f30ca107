"""Meters, which measure settings on one half of the document's tail, by attention or by perplexity."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.reporting.queries import QueryBlock, tail_block
from sparsekv.runtime.reporting.recall import MeasuredSetting, SharedStates, measure_layer
from sparsekv.runtime.selection.interface import Budget, MethodSpec

if TYPE_CHECKING:  # the module imports transformers, which only perplexity needs
    from sparsekv.runtime.decoding.open import OpenIndex


@dataclass(frozen=True)
class Point:
    """Measures of a setting: KV fraction, recall and output error as means over KV heads and queries, and perplexity.

    `perplexity` is divided by the perplexity of dense attention. A measure that the meter does not compute is NaN.
    """

    kv_fraction: float
    recall: float = math.nan
    error: float = math.nan
    perplexity: float = math.nan


Shares = dict[int, float]
"""Budget of each indexed layer, by layer number, as a share of the tokens between sinks and tail."""
Progress = Callable[[int, int], None]


class AttentionMeter:
    """Measures each layer's attention, compared with dense attention, on one half of the tail's queries.

    Args:
        reference: recall is the share of the oracle's tokens at this budget that a setting selects.
        calibration: measure on the tail's first half; False: on the held-out second half.
        stride: measure every `stride`-th query.
        outputs: also measure the error of attention's output.
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
        self.shared: set[MethodSpec] = set()
        """Variants whose layers share state. Such a variant is measured on all layers or on none."""
        self._known: dict[tuple[MethodSpec, float, int], Point] = {}

    def measure(
        self, wanted: Iterable[tuple[MethodSpec, Shares]], progress: Progress, layers: Sequence[int] | None = None
    ) -> None:
        """Measure variants of methods at each layer's budget, a share of the tokens between sinks and tail.

        Skips layers and budgets that were measured before. Needs the memory of one layer.

        Args:
            progress: called after each layer, also after a skipped one, with the number of layers so far and the total.
            layers: layers to measure; None: all. Variants whose layers share state are always measured on all layers.
        """
        states, asked = SharedStates(), self.layers if layers is None else layers
        wanted = [
            (form, shares)
            for form, shares in wanted
            if any((form, shares[layer], layer) not in self._known for layer in asked)
        ]
        for done, layer in enumerate(self.layers, 1):
            here = []
            for form, shares in wanted:
                if states.get((form.name, form.variant)):
                    self.shared.add(form)
                if form in self.shared or (layer in asked and (form, shares[layer], layer) not in self._known):
                    here.append((form, shares[layer]))
            self._measure_layer(layer, list(dict.fromkeys(here)), states)
            progress(done, len(self.layers))

    def mean(self, form: MethodSpec, shares: Shares, layers: Sequence[int] | None = None) -> Point:
        """Return the measures of a measured setting, as means over `layers`; None: over all layers."""
        points = [self.at(form, shares[layer], layer) for layer in layers or self.layers]
        return Point(*(fmean(values) for values in zip(*map(astuple, points), strict=True)))

    def at(self, form: MethodSpec, share: float, layer: int) -> Point:
        """Return the measures of a variant in one layer at a measured budget."""
        return self._known[form, share, layer]

    def _measure_layer(self, layer: int, here: list[tuple[MethodSpec, float]], states: SharedStates) -> None:
        if not here:
            return
        measured = {self._measured(form, share): (form, share) for form, share in here}
        rows, blocks = LayerRows(self.artifact, layer), [self._block(layer)]
        for one, measures in measure_layer(rows, list(measured), blocks, states, self.device).items():
            means = {name: float(values.mean()) for name, values in measures.means().items()}
            point = Point(means["kv_fraction"], means["recall"], means["output_error"])
            self._known[*measured[one], layer] = point

    def _measured(self, form: MethodSpec, share: float) -> MeasuredSetting:
        return MeasuredSetting(form, Budget(share), reference=self.reference, outputs=self.outputs)

    def _block(self, layer: int) -> QueryBlock:
        block = tail_block(self.artifact, layer, calibration=self.calibration)
        return replace(block, queries=block.queries[:, :: self.stride], visible=block.visible[:: self.stride])


class ModelMeter:
    """Measures the perplexity of one half of the tail by running the model, with a new cache for each setting.

    The tail is fed token by token, as in generation. A token is predicted from the sinks, the selected middle tokens
    and the earlier tail tokens. With `calibration`, the tail's first half is fed and its loss is counted. Otherwise the
    whole tail is fed, and the loss of its second half is counted.

    Raises:
        UsageError: the model has layers with a state. The tail's first token is predicted from the token before the
            tail, and an index need not store the state before that token.
    """

    def __init__(self, index: "OpenIndex", *, calibration: bool):
        split = index.split
        if index.artifact.manifest.states:
            raise UsageError(
                f"--target-perplexity: the model has layers with a state, and {index.artifact.folder} stores no state "
                "from which the beginning of its tail can be predicted; give --target-error or --target-recall"
            )
        self.index, self.after = index, split.sinks + split.middle
        tail, half = index.input_ids[self.after :], split.tail // 2
        self.fed = tail[:half] if calibration else tail
        self.counted = slice(0 if calibration else half, None)
        self.dense: float | None = None
        self._known: dict[tuple[MethodSpec, tuple[float, ...]], Point] = {}

    def measure(self, wanted: Iterable[tuple[MethodSpec, Shares]], progress: Progress) -> None:
        """Measure settings that were not measured before.

        Args:
            progress: called with the number of measured settings and the total.
        """
        new = [(form, shares) for form, shares in wanted if (form, tuple(shares.values())) not in self._known]
        for done, (form, shares) in enumerate(new, 1):
            self._known[form, tuple(shares.values())] = self._measured(form, shares)
            progress(done, len(new))

    def mean(self, form: MethodSpec, shares: Shares) -> Point:
        return self._known[form, tuple(shares.values())]

    def _measured(self, form: MethodSpec, shares: Shares) -> Point:
        from sparsekv.runtime.decoding.perplexity import losses  # the module imports transformers

        if self.dense is None:
            whole = losses(self.index, self.index.dense_cache(self.after), self.fed, self.after)
            self.dense = float(whole[self.counted].mean())
        budgets = {layer: Budget(share) for layer, share in shares.items()}
        first = next(iter(budgets.values()))
        cache = self.index.cache(DecodeConfig(form, first, budgets), tail=False)
        found = losses(self.index, cache, self.fed, self.after)[self.counted].mean()
        return Point(kv_fraction=cache.kv_fraction(), perplexity=float((found - self.dense).exp()))


Meter = AttentionMeter | ModelMeter
"""Meter of settings on one half of the tail."""
