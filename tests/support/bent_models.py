"""Tiny models whose attention has a mask or a bias of its own, which only transformers' own attention gets."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from .tiny_models import FAMILIES

WINDOW = 24
IGNORED = 12
REACH = 48
"""Tokens of a build's preflight, within which the bends of BEYOND change nothing."""

Bend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns what is added to the logits of queries' positions [Q, 1] and keys' positions [1, T]."""


def window(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A window that no layer passes on: tokens further back are not seen."""
    return torch.where(query - keys < WINDOW, 0.0, float("-inf"))


def without_first(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The first tokens are not seen by any that come later."""
    return torch.where((keys >= IGNORED) | (query < IGNORED), 0.0, float("-inf"))


def bias(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Tokens count less the further back they are, as with ALiBi."""
    return -0.05 * (query - keys)


BENDS = {"window": window, "without-first": without_first, "bias": bias}


def long_window(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A window of 60 tokens."""
    return torch.where(query - keys < 60, 0.0, float("-inf"))


def hole(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Tokens between the 50th and the 90th are not seen by any that come later."""
    return torch.where((keys < 50) | (keys >= 90) | (query < 90), 0.0, float("-inf"))


def far_bias(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Tokens further back than REACH count less the further back they are."""
    return -0.05 * (query - keys - REACH).clamp(min=0)


BEYOND = {"window": long_window, "hole": hole, "bias": far_bias}
"""Bends that no sequence of REACH tokens shows."""


def spares_the_end(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A window of 60 tokens for queries before the 260th alone."""
    return torch.where((query - keys < 60) | (query >= 260), 0.0, float("-inf"))


class BentLlama(LlamaForCausalLM):
    """Llama, which adds a mask of its own to what its layers attend by."""

    bend = staticmethod(window)

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        query = torch.arange(before, before + input_ids.shape[1])[:, None]
        keys = torch.arange(before + input_ids.shape[1])[None]
        causal = torch.where(keys <= query, 0.0, float("-inf"))
        mask = (causal + type(self).bend(query, keys))[None, None]
        return super().forward(input_ids=input_ids, attention_mask=mask, past_key_values=past_key_values, **kwargs)


def bend(model: PreTrainedModel, how: str) -> PreTrainedModel:
    """A model with the same weights, bent in one of the ways of BENDS."""
    kind = type(f"Bent{how}", (BentLlama,), {"bend": staticmethod(BENDS[how])})
    bent: PreTrainedModel = kind(model.config).eval()
    bent.load_state_dict(model.state_dict())
    return bent


def attention_bent_by(name: str, bend: Bend) -> type[PreTrainedModel]:
    """A Llama with an attention of its own, which is sdpa with a bent mask.

    It registers it with transformers as any package may. Whatever replaces its attention replaces the bend with it.
    """
    implementation = f"bent_{name}"
    registered = AttentionInterface(), AttentionMaskInterface()

    def make_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, **how: Any) -> torch.Tensor:
        mask: torch.Tensor = registered[1]["eager"](batch_size, q_length, kv_length, q_offset, **how)
        query = torch.arange(q_offset, q_offset + q_length)[:, None]
        return mask + bend(query, torch.arange(kv_length)[None])

    AttentionInterface.register(implementation, registered[0]["sdpa"])
    AttentionMaskInterface.register(implementation, make_mask)

    class Bent(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.set_attn_implementation(implementation)

    return Bent


def bend_attention(model: PreTrainedModel, name: str, by: Bend) -> PreTrainedModel:
    """A model with the same weights, whose own attention is bent."""
    bent = attention_bent_by(name, by)(copy.deepcopy(model.config)).eval()
    bent.load_state_dict(model.state_dict())
    return bent


def bent_llama(how: str) -> PreTrainedModel:
    """The tiny Llama, bent."""
    return bend(FAMILIES["llama"](), how)
