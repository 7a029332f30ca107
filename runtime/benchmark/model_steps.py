"""Decode steps of a whole model as commands run them: of contexts with a question each, or of one with several."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from transformers import PreTrainedModel

from sparsekv.kernels.common.cache_argument import with_cache
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.runtime.attention.packed_layers import packed_layer
from sparsekv.runtime.benchmark.dense import DenseForm
from sparsekv.runtime.benchmark.layer import LayerData
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.packed_cache import PackedCache, PackedLayer
from sparsekv.runtime.cache.slots import PackedStep, Piece
from sparsekv.runtime.cache.stored_layer import StoredLayer
from sparsekv.runtime.decoding.few_rows_linear import all_cores
from sparsekv.runtime.decoding.shared_step import SharedStep
from sparsekv.runtime.decoding.step import captured_step


class DenseFormLayer(StoredLayer):
    """Stores new rows like any layer, but attends to the context alone, by a given function of the queries."""

    def __init__(self, data: LayerData, form: DenseForm):
        super().__init__(data.split.tokens, data.keys[:, :0], data.values[:, :0])
        self.form = form

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.form(call.query)


class PackedForm(PackedLayer):
    """The same for several questions over one context."""

    def __init__(self, layer: DenseFormLayer, slots: int):
        super().__init__(layer, slots)
        self.form = layer.form

    def answer(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        return self.form(call.query)

    def ask(self, call: AttentionCall, piece: Piece, number: int) -> torch.Tensor:
        raise NotImplementedError  # nothing is prefilled here


class ModelSteps(ABC):
    """Steps that follow one another; call them within `routed`."""

    @abstractmethod
    def routed(self) -> AbstractContextManager[None]:
        """While it lasts the model attends as these steps want it."""

    @abstractmethod
    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, V] after tokens [batch, 1]; the next call may overwrite them."""

    @abstractmethod
    def captured(self) -> bool:
        """Whether they are replayed as CUDA graphs."""


class BatchSteps(ModelSteps):
    """Of a batch of contexts with a question each; one context is what `generate` runs.

    Args:
        steps: how many there will be.
    """

    def __init__(self, model: PreTrainedModel, layers: list[StoredLayer], batch: int, steps: int):
        self.model, self.cache = model, IndexCache(layers)
        self.step = captured_step(model, self.cache, batch=batch)
        self.steps = steps

    @contextmanager
    def routed(self) -> Iterator[None]:
        with route_attention(self.model, self.cache.attend), all_cores(self.model):
            if self.step is not None:
                self.step.begin(self.steps)
            try:
                yield
            finally:
                self.cache.release()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.step is not None:
            return self.step(tokens)
        logits: torch.Tensor = self.model(input_ids=tokens, **with_cache(self.model, self.cache)).logits
        return logits[:, -1]

    def captured(self) -> bool:
        return self.cache.graph is not None


class QuestionSteps(ModelSteps):
    """Of one context with several questions, as `generate --batch-file` runs them.

    Args:
        tokens: of the context.
    """

    def __init__(self, model: PreTrainedModel, layers: list[StoredLayer], tokens: int, questions: int):
        packed = [
            PackedForm(layer, questions) if isinstance(layer, DenseFormLayer) else packed_layer(layer, questions)
            for layer in layers
        ]
        self.model, self.cache, self.slots, self.fed = model, PackedCache(layers, packed), list(range(questions)), 0
        self.step = SharedStep(model, self.cache, tokens, questions, capture=model.device.type == "cuda")

    @contextmanager
    def routed(self) -> Iterator[None]:
        with route_attention(self.model, self.cache.attend), all_cores(self.model):
            yield

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.fed += 1
        return self.step(tokens[:, 0].tolist(), self.slots, [self.fed - 1] * len(self.slots))

    def captured(self) -> bool:
        return bool(self.step.graphs)
