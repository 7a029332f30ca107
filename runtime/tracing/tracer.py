"""Records an answer while it is made, and tells what it attended to."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sparsekv.runtime.attention.executors import GatherMaker
from sparsekv.runtime.cache.layer_rows import LayerRows
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.setting import Setting
from sparsekv.runtime.tracing.document import MOST_PASSAGES, recorded
from sparsekv.runtime.tracing.passages import Passages
from sparsekv.runtime.tracing.recorder import Largest, LayerRecorder, RecordingExecutor, largest_passages


@dataclass
class TokenMeans:
    """The largest passages of each answer token: means over KV heads and over so many layers, which come in order."""

    layers: int
    tokens: list[Largest] = field(default_factory=list)
    _sums: torch.Tensor | None = None
    _added: int = 0

    def add(self, by_passage: torch.Tensor) -> None:
        """Add a layer's shares of one token [2 or 3, Hk, P]."""
        mean = by_passage.mean(1, keepdim=True)
        self._sums, self._added = mean if self._sums is None else self._sums + mean, self._added + 1
        if self._added == self.layers:
            self.tokens.append(largest_passages(self._sums / self.layers, MOST_PASSAGES))
            self._sums, self._added = None, 0


class Tracer:
    """Records the steps of one answer, of each layer that selects.

    Args:
        truth: also compute dense attention of each step's queries: on a GPU the document's keys and values are kept a
            second time for it.
    """

    def __init__(self, index: OpenIndex, setting: Setting, passages: Passages, *, truth: bool):
        manifest, device = index.artifact.manifest, index.model.device
        self.split = manifest.split
        self.token_means = TokenMeans(len(manifest.indexed_layers))
        first, middle = self.split.sinks, self.split.middle
        passage_of = passages.of_tokens()[first : first + middle].to(device)
        lengths = passage_of.bincount(minlength=len(passages))
        passage_of = torch.cat([passage_of, passage_of.new_tensor([len(passages)])])
        budgets = setting.layer_budgets or {}
        self.layers = {
            layer: LayerRecorder(
                lengths,
                passage_of,
                budgets.get(layer, setting.budget).tokens(middle),
                LayerRows(index.artifact, layer) if truth else None,
                self.token_means.add,
            )
            for layer in manifest.indexed_layers
        }

    def gather(self, layer: int) -> GatherMaker:
        """What makes a layer's executor."""
        return partial(RecordingExecutor, record=self.layers[layer])

    def shares(self) -> dict[str, Any]:
        """What was recorded, as `recorded` gives it."""
        return recorded(self.layers, self.token_means.tokens, self.split.sinks)
