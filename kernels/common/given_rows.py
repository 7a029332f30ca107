"""Forward passes of a few tokens over keys and values that a callback returns, for checks of a model or an index.

Decoding uses only this file's base classes of caches, and the functions that return the arguments of a forward pass.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from typing import Any, TypeAlias

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations import sdpa_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparsekv.kernels.common.hook import AttentionCall, AttentionFunction, alone, equal_channels, route_attention
from sparsekv.kernels.common.states import State, layer_kinds, state_tensors


def cache_argument(model: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """Return the keyword argument that passes a cache to the model's forward pass.

    Its name is `cache` for models of transformers 5.24 and later, and `past_key_values` for those of earlier versions.
    """
    return {_keyword(type(model).forward): cache}


def tokens_at(model: PreTrainedModel, input_ids: torch.Tensor, first: int) -> dict[str, torch.Tensor]:
    """Return the keyword arguments of a forward pass over tokens [T] whose first position is `first`.

    Without `position_ids`, Bamba in transformers up to 5.24 counts positions from 0, even over a cache.
    """
    ids = input_ids[None].to(model.device)
    return {"input_ids": ids, "position_ids": torch.arange(first, first + ids.shape[1], device=ids.device)[None]}


def with_cache(model: PreTrainedModel, cache: Cache) -> dict[str, Any]:
    """Return the keyword arguments of a forward pass that attends to a cache and appends to it."""
    return {**cache_argument(model, cache), "use_cache": True}


@lru_cache(maxsize=16)
def _keyword(forward: Callable[..., Any]) -> str:
    return "cache" if "cache" in signature(forward).parameters else "past_key_values"


RowPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Rows: TypeAlias = Callable[[int, RowPair], RowPair]
"""Callback that returns a layer's keys and values [Hk, T, D] of all tokens up to the last of the pass.

The returned tensors are on the model's device. The callback's arguments are the layer's index, and the keys and values
[Hk, Q, D] of the tokens of the pass, which the model has just computed.
"""


class CalledCache(Cache):
    """A cache whose `update` stores no rows: the attention function receives each layer's new rows, and stores them."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new rows unchanged; the layer's attention function stores them.

        So torch's compiler sees one operator per layer, the attention function, and no operations on the cache.
        """
        return key_states, value_states


class RowLayer(CacheLayerMixin):
    """A cache layer without a limit on tokens and without a sliding window of its own."""

    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing; a layer that allocates its memory at the first keys overrides this."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class GivenLayer(RowLayer):
    """A cache layer that stores no rows: the attention function attends to the rows that a callback returns.

    `before` is the number of tokens before the pass. The mask sizes cover all tokens even for a layer with a sliding
    window, because the model's mask applies the window.
    """

    is_compileable = hasattr(sdpa_attention, "pack_gqa")
    """Whether transformers makes a mask even for a single token, which needs none: True for 5.23 and later.

    With a mask, the `sdpa` attention of these versions computes all query heads of a KV head in one matrix product. On
    a CPU this takes two thirds of the time of a pass without a mask.
    """

    def __init__(self, before: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen, self.is_initialized = before, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the tokens, and return their rows unchanged."""
        self.seen += key_states.shape[2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.seen


def logits_over_rows(
    model: PreTrainedModel, input_ids: torch.Tensor, before: int, rows: Rows, state: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return only the logits of `pass_over_rows`, without the recurrent state."""
    return pass_over_rows(model, input_ids, before, rows, state)[0]


@torch.inference_mode()
def pass_over_rows(
    model: PreTrainedModel, input_ids: torch.Tensor, before: int, rows: Rows, state: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, State]:
    """Compute the logits [Q, vocabulary], float32 on the CPU, of tokens [Q] whose first position is `before`.

    The second result is the recurrent state of the model's layers after these tokens; empty for a model without one.
    The model makes its own masks, and attends with the implementation that it was loaded with, or with `eager` where
    `soft_caps` sets it. If a layer needs a mask, this implementation may copy the layer's rows for each query head.

    Args:
        rows: returns a layer's keys and values; see `Rows`.
        state: the recurrent state after the `before` tokens; empty without such tokens, or for a model without a state.
    """
    with alone(model), soft_caps(model):
        loaded = model.config._attn_implementation
        token = _given.set(_Given(loaded, rows))
        try:
            model.set_attn_implementation(IMPLEMENTATION)
            return _pass(model, input_ids, before, state)
        finally:
            model.set_attn_implementation(loaded)
            _given.reset(token)


@torch.inference_mode()
def routed_logits_over_rows(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    before: int,
    rows: Rows,
    state: Mapping[str, torch.Tensor],
    attend: AttentionFunction,
) -> torch.Tensor:
    """Compute the logits of `logits_over_rows`, with the attention function `attend` instead of the model's attention.

    `attend` gets each layer's call with the keys and values that `rows` returns.
    """

    def over_rows(call: AttentionCall) -> torch.Tensor:
        keys, values = rows(call.layer, (call.keys, call.values))
        return attend(replace(call, keys=keys, values=values))

    with route_attention(model, over_rows):
        return _pass(model, input_ids, before, state)[0]


def _pass(
    model: PreTrainedModel, input_ids: torch.Tensor, before: int, state: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, State]:
    kinds = layer_kinds(model.config)
    cache = Cache(layers=kinds.cache_layers([GivenLayer(before) for _ in kinds.attending], state))
    logits: torch.Tensor = model(**tokens_at(model, input_ids, before), **with_cache(model, cache)).logits[0]
    return logits.float().cpu(), state_tensors(cache.layers)


IMPLEMENTATION = "sparsekv-given-rows"


@dataclass(frozen=True)
class _Given:
    """Name of the model's own attention implementation, and the callback that returns the rows to attend to."""

    loaded: str
    rows: Rows


_given: ContextVar[_Given] = ContextVar("sparsekv_given_rows")


def _attend_to_given_rows(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **named: Any
) -> Any:
    """Attend to the rows that the callback returns, with the model's own implementation."""
    given = _given.get()
    own = equal_channels(key[0], value[0])
    keys, values = given.rows(module.layer_idx, (own[0], own[1]))  # type: ignore[arg-type]
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend = ALL_ATTENTION_FUNCTIONS.get(given.loaded, eager)
    keys, values = keys[None, ..., : key.shape[-1]], values[None, ..., : value.shape[-1]]
    return attend(module, query, keys, values, *arguments, **named)


def _own_mask(*arguments: Any, **named: Any) -> Any:
    """Return the mask that the model's own attention implementation makes."""
    return ALL_MASK_ATTENTION_FUNCTIONS[_given.get().loaded](*arguments, **named)


AttentionInterface.register(IMPLEMENTATION, _attend_to_given_rows)
AttentionMaskInterface.register(IMPLEMENTATION, _own_mask)


@torch.inference_mode()
def keys_of_one_token(model: PreTrainedModel, input_ids: torch.Tensor, position: int) -> dict[int, torch.Tensor]:
    """Compute the keys [Hk, D] of one token id [1] that runs alone at a position, in each layer that attends.

    If several processes (ranks) share the model, all of them must call this function together.
    """
    keys: dict[int, torch.Tensor] = {}

    def attend_to_itself(call: AttentionCall) -> torch.Tensor:
        keys[call.layer] = call.keys[:, 0]
        return call.values.repeat_interleave(len(call.query) // len(call.values), 0)

    ids = input_ids[None].to(model.device)
    with route_attention(model, attend_to_itself):
        model(input_ids=ids, position_ids=torch.full_like(ids, position), use_cache=False)
    return keys


@contextmanager
def soft_caps(model: PreTrainedModel) -> Iterator[None]:
    """Use the `eager` attention within the context, if the model has a soft cap and was loaded with `sdpa`.

    `sdpa` of transformers 5.17 silently ignores a soft cap.
    """
    loaded = model.config._attn_implementation
    if loaded != "sdpa" or getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is None:
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(loaded)
