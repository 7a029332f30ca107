"""Recurrent and convolution states of layers that keep a state instead of keys and values, or in addition to them.

transformers stores states in cache layers of linear attention. A layer overwrites its state at each token, and so a
state cannot be cropped to fewer tokens. Instead the state is copied after the tokens from which decoding will
continue, and is restored from the copy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

ATTENDING = frozenset({"full_attention", "sliding_attention", "attention"})
"""Layer types of transformers that attend to all tokens or to a sliding window, and keep no state."""
KEEPING = frozenset({"linear_attention", "conv"})
"""Layer types that keep a state and do not attend."""
BOTH = frozenset({"hybrid"})
"""Layer types that attend and keep a state."""
NEITHER = frozenset({"moe", "mlp"})

State = dict[str, torch.Tensor]
"""States of all layers that keep a state, after some tokens of one sequence: tensors [1, ...] with names such as
`layer_003.conv_0` and `layer_003.recurrent_0`."""


class RowStateLayer(LinearAttentionAndFullAttentionLayer):
    """A cache layer that stores a state itself, and stores keys and values in another cache layer."""

    def __init__(self, rows: CacheLayerMixin, states: int):
        super().__init__(number_of_states=states)
        self.rows = rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        return self.rows.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return self.rows.get_max_length()


@dataclass(frozen=True)
class LayerKinds:
    """Indices of a model's layers that attend, and of those that keep a state.

    Args:
        layers: number of all layers.
        attending, keeping: indices of the layers that attend and of the layers that keep a state, ascending.
        states: number of states of each kind, recurrent and convolution, that a layer keeps.
    """

    layers: int
    attending: tuple[int, ...]
    keeping: tuple[int, ...] = ()
    states: int = 1

    def cache_layers(self, rows: Sequence[CacheLayerMixin], state: Mapping[str, torch.Tensor]) -> list[Any]:
        """Make the layers of a cache for a sequence that continues after some tokens.

        Args:
            rows: one cache layer for the keys and values of each layer in `attending`, in the same order.
            state: state after these tokens, which is copied; empty without such tokens, or if no layer keeps a state.
        """
        keepers, keeping = dict(zip(self.attending, rows, strict=True)), set(self.keeping)
        made = [self._made(keepers.get(layer), keeps=layer in keeping) for layer in range(self.layers)]
        put_state(made, state)
        return made

    def _made(self, rows: CacheLayerMixin | None, *, keeps: bool) -> CacheLayerMixin | LinearAttentionCacheLayerMixin:
        if rows is None:
            return LinearAttentionLayer(number_of_states=self.states if keeps else 0)
        return RowStateLayer(rows, self.states) if keeps else rows


def layer_kinds(config: PreTrainedConfig) -> LayerKinds:
    """Return the kinds of a model's layers; a layer of an unknown type counts as a layer that attends."""
    config = config.get_text_config()
    types = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    return LayerKinds(
        len(types),
        tuple(layer for layer, one in enumerate(types) if one not in KEEPING | NEITHER),
        tuple(layer for layer, one in enumerate(types) if one in KEEPING | BOTH),
        getattr(config, "number_of_conv_states", 1),
    )


def state_tensors(layers: Iterable[object]) -> State:
    """Return the states that a cache's layers have so far, without copies; the model overwrites them."""
    found: State = {}
    for number, layer in enumerate(layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for kind, of_kind in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                found |= {f"layer_{number:03d}.{kind}_{at}": one for at, one in of_kind.items() if one is not None}
    return found


def copied_state(layers: Iterable[object]) -> State:
    """Return copies of the states of a cache's layers."""
    return {name: tensor.clone() for name, tensor in state_tensors(layers).items()}


def put_state(layers: Sequence[object], state: Mapping[str, torch.Tensor]) -> None:
    """Copy states to new tensors, and set the copies as the states of a cache's layers."""
    hold_state(layers, {name: tensor.clone() for name, tensor in state.items()})


def hold_state(layers: Sequence[object], state: Mapping[str, torch.Tensor]) -> None:
    """Set tensors [B, ...] of B sequences as the states of a cache's layers, without copies; steps overwrite them."""
    for name, tensor in state.items():
        number, _, of_layer = name.removeprefix("layer_").partition(".")
        kind, _, at = of_layer.partition("_")
        layer, place = layers[int(number)], int(at)
        assert isinstance(layer, LinearAttentionCacheLayerMixin)
        layer.has_previous_state[place] = True
        if kind == "conv":
            layer.conv_states[place], layer.is_conv_states_initialized[place] = tensor, True
            layer.conv_kernel_size[place] = tensor.shape[-1]
        else:
            layer.recurrent_states[place], layer.is_recurrent_states_initialized[place] = tensor, True


def relative_distance(own: torch.Tensor, stored: torch.Tensor, dim: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the norm of the difference of two tensors, divided by the norm of the stored tensor.

    Norms are over the dimensions `dim`, or over all.
    """
    expected = stored.float()
    norm = expected.norm(dim=dim).clamp(min=torch.finfo(torch.float32).tiny)
    apart: torch.Tensor = (own.float() - expected).norm(dim=dim) / norm
    return apart


def state_distance(own: State, stored: State, *, exact: bool) -> float:
    """Return the largest relative distance of a layer's tensor in two states of the same shapes.

    Unless the keys and values before the states are `exact`, return the median: int8 rounding may route a token to
    another expert, which changes the states of some layers.
    """
    distances = torch.stack([relative_distance(own[name], stored[name]) for name in stored])
    return float(distances.amax() if exact else distances.median())
