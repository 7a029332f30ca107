"""The KV cache of many sequences over one stored context, whose tokens go through the model in one row."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import Cache

from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.cache.built_layers import BuiltLayers
from sparsekv.runtime.cache.read_rows import ReadRows
from sparsekv.runtime.cache.slots import PackedStep, Piece, SlotRows
from sparsekv.runtime.cache.stored_layer import StoredLayer


class PackedLayer(ABC):
    """One layer: what all sequences share lies in `layer`, their own rows in slots."""

    def __init__(self, layer: StoredLayer, slots: int):
        keys, values = layer.keys, layer.values
        assert keys is not None
        assert values is not None
        self.own = SlotRows(slots, (keys, values))

    def attend(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        """Store the step's rows, then attend with each token; query and output are [Hq, T, D]."""
        self.own.write(call.keys, call.values, step)
        if not step.pieces:
            return self.answer(call, step)
        output = call.query.new_empty(*call.query.shape[:2], call.values.shape[2])
        if len(step.single):
            output[:, step.single] = self.answer(replace(call, query=call.query[:, step.single]), step)
        self.ask_all(call, step, output)
        return output

    def ask_all(self, call: AttentionCall, step: PackedStep, output: torch.Tensor) -> None:
        """Write the attention of all questions' tokens into their places of output [Hq, T, D]."""
        for number, piece in enumerate(step.pieces):
            output[:, piece.where] = self.ask(replace(call, query=call.query[:, piece.where]), piece, number)

    @abstractmethod
    def answer(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        """Attention [Hq, B, D] of one token of each sequence that answers."""

    @abstractmethod
    def ask(self, call: AttentionCall, piece: Piece, number: int) -> torch.Tensor:
        """Attention [Hq, Q, D] of a question's tokens; `number` is the question's among those of the step."""


class PackedCache(Cache):
    """To transformers a cache; `attend` is the attention function to route the model's calls to.

    Args:
        stored: layers of the stored context, of which it takes the place in the model.
    """

    def __init__(self, stored: list[StoredLayer], packed: list[PackedLayer], built: BuiltLayers | None = None):
        super().__init__(layers=list(stored))
        self.built = built or BuiltLayers()
        self.stored, self.packed = stored, packed
        self.step: PackedStep | None = None

    def begin(self, step: PackedStep) -> None:
        """Say whose tokens the next forward pass has."""
        self.step = step

    def reserve(self, longest: int) -> int:
        """Make room for so many own rows of each sequence; returns the room there is."""
        for layer in self.packed:
            layer.own.reserve(longest)
        return self.packed[0].own.capacity

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """While it lasts, what steps read is counted on the device alone; `advance` counts the rest, once a replay."""
        for read in self.reads:
            read.deferred = True
        try:
            yield
        finally:
            for read in self.reads:
                read.deferred = False

    def advance(self) -> None:
        """Count what a replayed step read, as far as the host knows it."""
        for read in self.reads:
            read.advance()

    @property
    def reads(self) -> list[ReadRows]:
        return [layer.read for layer in self.stored if layer.read is not None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows themselves: `attend` gets and stores them."""
        return key_states, value_states

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store a layer's new rows and attend to shared and own ones; returns [Hq, T, D].

        Raises:
            IdentityError: the layer attends otherwise than when the index was built.
        """
        self.built.check(call)
        assert self.step is not None
        return self.packed[call.layer].attend(call, self.step)
