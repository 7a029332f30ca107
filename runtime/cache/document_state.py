"""Recurrent and convolution states after a stored context, and copies of the states for the sequences of a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from sparsekv.kernels.common.states import LayerKinds, State, hold_state


@dataclass(frozen=True)
class DocumentState:
    """State after a stored context, from which every answer begins; empty if no layer of the model keeps a state.

    Args:
        stored: tensors [1, ...] on the model's device, which are never changed.
    """

    kinds: LayerKinds
    stored: State = field(default_factory=dict)

    def cache_layers(self, rows: Sequence[CacheLayerMixin]) -> list[Any]:
        """Make all layers of a cache, given its layers with rows; layers with a state get copies of the state."""
        return self.kinds.cache_layers(rows, self.stored)

    def copy_to(self, live: Mapping[str, torch.Tensor]) -> None:
        """Copy the state to the tensors `live`, in place, because CUDA graphs of steps refer to these tensors."""
        for name, tensor in self.stored.items():
            live[name].copy_(tensor)


class SlotStates:
    """States of S sequences that decode over one stored context: tensors [S, ...].

    The model's pass over a question updates views of the question's slot. A decode step updates copies of the states of
    its sequences, and `end_step` writes the copies back to the slots.
    """

    def __init__(self, document: DocumentState, slots: int):
        self.document = document
        self.slots = {name: one.expand(slots, *one.shape[1:]).clone() for name, one in document.stored.items()}
        self._step: tuple[State, torch.Tensor] | None = None

    def begin_question(self, layers: Sequence[object], slot: int, *, continued: bool) -> None:
        """Make a cache's layers update the states of a slot in place.

        Args:
            layers: the cache's layers.
            continued: the slot has the states after the question's first tokens, and keeps them. Otherwise it gets the
                states after the stored context.
        """
        views = self._views(slot)
        if not continued:
            self.document.copy_to(views)
        hold_state(layers, views)

    def copied(self, slot: int) -> State:
        """Return copies [1, ...] of the states of a slot."""
        return {name: one.clone() for name, one in self._views(slot).items()}

    def put(self, slot: int, state: State) -> None:
        """Overwrite the states of a slot."""
        for name, view in self._views(slot).items():
            view.copy_(state[name])

    def _views(self, slot: int) -> State:
        return {name: of_slots[slot : slot + 1] for name, of_slots in self.slots.items()}

    def begin_step(self, layers: Sequence[object], slots: torch.Tensor) -> None:
        """Make a cache's layers update copies of the states of the slots `slots` [B]."""
        copies = {name: of_slots[slots] for name, of_slots in self.slots.items()}
        self._step = copies, slots
        hold_state(layers, copies)

    def end_step(self) -> None:
        """Write the states of a decode step back to the slots. A slot may be repeated with equal states."""
        assert self._step is not None
        copies, slots = self._step
        for name, tensor in copies.items():
            self.slots[name].index_copy_(0, slots, tensor)
