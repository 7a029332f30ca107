"""Logits of a few tokens over given keys and values instead of a prefill, and the name of transformers' argument for a
cache."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from typing import Any, TypeAlias

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations import sdpa_attention

from sparsekv.kernels.common.hook import AttentionCall, alone, route_attention


def cache_argument(model: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """The keyword argument that passes a cache: `cache` from transformers 5.24 on, before that `past_key_values`."""
    return {_keyword(type(model).forward): cache}


def with_cache(model: PreTrainedModel, cache: Cache) -> dict[str, Any]:
    """Keyword arguments of a forward pass that attends to a cache and appends to it."""
    return {**cache_argument(model, cache), "use_cache": True}


@lru_cache(maxsize=16)
def _keyword(forward: Callable[..., Any]) -> str:
    return "cache" if "cache" in signature(forward).parameters else "past_key_values"


RowPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Rows: TypeAlias = Callable[[int, RowPair], RowPair]
"""Returns a layer's keys and values [Hk, T, D] of all tokens up to the last that runs, on the model's device. It gets
the layer's number and the keys and values [Hk, Q, D] that the model has just computed of the tokens that run."""


class CalledCache(Cache):
    """A cache that stores nothing itself: the attention function gets the rows of a call, and stores them."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows themselves, so that torch's compiler meets one operator a layer."""
        return key_states, value_states


class RowLayer(CacheLayerMixin):
    """A cache layer of any number of tokens, without a sliding window of its own."""

    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to allocate."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class GivenLayer(RowLayer):
    """A cache layer that returns given rows, the running tokens' included, and stores none.

    Its mask sizes are those of all tokens, also where the model attends in a window: the model masks them itself.
    """

    is_compileable = hasattr(sdpa_attention, "pack_gqa")
    """Whether the model makes a mask also for a single token, which sees all rows. On a CPU transformers from 5.23 on
    attends with one in two thirds of the time."""

    def __init__(self, layer: int, before: int, rows: Rows):
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer, self.seen, self.rows = layer, before, rows
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen += key_states.shape[2]
        keys, values = self.rows(self.layer, (key_states[0], value_states[0]))
        return keys[None], values[None]

    def get_seq_length(self) -> int:
        return self.seen


@torch.inference_mode()
def logits_over_rows(model: PreTrainedModel, input_ids: torch.Tensor, before: int, rows: Rows) -> torch.Tensor:
    """Logits [Q, vocabulary] of tokens [Q] at positions from `before` on, float32 on the CPU.

    The model attends by the implementation that it was loaded with and makes its own masks, unless `route_attention`
    is active. Allocates what that implementation does for Q queries: without a mask nothing of the rows' size, with one
    perhaps a layer's rows for each query head.
    """
    layers = model.config.get_text_config().num_hidden_layers
    cache = Cache(layers=[GivenLayer(layer, before, rows) for layer in range(layers)])
    with alone(model), soft_caps(model):
        ids = input_ids[None].to(model.device)
        logits: torch.Tensor = model(input_ids=ids, **with_cache(model, cache)).logits[0]
        return logits.float().cpu()


@torch.inference_mode()
def keys_of_one_token(model: PreTrainedModel, input_ids: torch.Tensor, position: int) -> dict[int, torch.Tensor]:
    """Keys [Hk, D] of each layer for one token id [1], run alone at a position; ranks of a model call it together."""
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
    """Within the context the model applies its soft cap, which `sdpa` of transformers 5.17 leaves out in silence."""
    loaded = model.config._attn_implementation
    if loaded != "sdpa" or getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is None:
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(loaded)
