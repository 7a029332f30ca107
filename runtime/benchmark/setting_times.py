"""The time of a decode step with a setting, over the middle layer of an index and on this machine."""

import torch

from sparsekv.formats.models.load import DTYPES
from sparsekv.formats.reader import Artifact
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.benchmark.clock import Clock
from sparsekv.runtime.benchmark.indexed_layers import asked, layer_of
from sparsekv.runtime.benchmark.layer import dense_layer, lay_out, layer_step, sparse_layer
from sparsekv.runtime.cache.layer_rows import LayerRows
from sparsekv.runtime.decoding.prepare import prepare_layer
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.form import Form


class SettingTimes:
    """Times a step of one query, choice included, over one layer's own keys and values.

    Memory: the layer's keys and values, and while a form is timed a copy of them in its layout.
    """

    def __init__(self, artifact: Artifact, clock: Clock):
        indexed = artifact.manifest.indexed_layers
        self.artifact, self.clock, self.layer = artifact, clock, indexed[len(indexed) // 2]
        self.data = asked(layer_of(artifact, self.layer, clock.device, DTYPES[artifact.manifest.dtype]), 1)

    @torch.inference_mode()
    def dense(self) -> float:
        """Milliseconds of a step of dense attention, as `generate --method dense` takes it; the median."""
        return self.clock.time(layer_step(self.data, dense_layer(self.data))).median

    @torch.inference_mode()
    def sparse(self, form: Form, share: float) -> float:
        """Milliseconds of a step of a form at a share of the middle; the median."""
        rows = LayerRows(self.artifact, self.layer)
        prepared = prepare_layer(rows, form.name, form.method, self.clock.device, residual=form.residual)
        middle = lay_out(self.data, prepared.selector)
        step = layer_step(
            self.data, sparse_layer(self.data, middle, prepared.selector, DecodeConfig(form, Budget(share)))
        )
        # A method that searches only every `step` steps is timed over that many.
        return self.clock.time(step, int(getattr(form.method, "step", 1))).median
