"""Records an answer while it is made, and tells what it attended to."""

from functools import partial
from typing import Any

import torch

from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.attention.executors import GatherMaker
from sparsekv.runtime.cache.layer_rows import LayerRows
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.tracing.document import recorded
from sparsekv.runtime.tracing.passages import Passages
from sparsekv.runtime.tracing.recorder import LayerRecorder, RecordingExecutor
from sparsekv.runtime.tracing.tokens import TokenRecorder


class Tracer:
    """Records the steps of one answer, of each layer that selects.

    Args:
        truth: also compute dense attention of each step's queries: on a GPU the document's keys and values are kept a
            second time for it.
    """

    def __init__(self, index: OpenIndex, config: DecodeConfig, passages: Passages, *, truth: bool):
        manifest, device = index.artifact.manifest, index.model.device
        self.split = manifest.split
        first, middle = self.split.sinks, self.split.middle
        self.recorder = TokenRecorder(len(manifest.indexed_layers), middle)
        passage_of = passages.of_tokens()[first : first + middle].to(device)
        lengths = passage_of.bincount(minlength=len(passages))
        passage_of = torch.cat([passage_of, passage_of.new_tensor([len(passages)])])
        self.layers = {
            layer: LayerRecorder(
                lengths,
                passage_of,
                config.budget_of(layer).tokens(middle),
                LayerRows(index.artifact, layer) if truth else None,
                self.recorder.add,
            )
            for layer in manifest.indexed_layers
        }

    def gather_maker(self, layer: int) -> GatherMaker:
        """What makes a layer's executor."""
        return partial(RecordingExecutor, record=self.layers[layer])

    def shares(self) -> dict[str, Any]:
        """What was recorded, as `recorded` gives it."""
        return recorded(self.recorder, list(self.layers), self.split.sinks)
