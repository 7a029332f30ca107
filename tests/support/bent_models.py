"""Tiny models with a mask or a bias of their own, which transformers' attention applies and sparsekv's does not."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from .tiny_models import FAMILIES

WINDOW = 24
IGNORED = 12
REACH = 48
"""Number of tokens of a build's preflight. The masks and biases of BEYOND change nothing in so short a sequence."""

Bend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that returns a mask or bias to add to the logits, from the positions of queries [Q, 1] and of keys [1,
T]."""


def window(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Mask tokens WINDOW or more positions back, by a window that no layer states."""
    return torch.where(query - keys < WINDOW, 0.0, float("-inf"))


def without_first(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Mask the first IGNORED tokens for all later tokens."""
    return torch.where((keys >= IGNORED) | (query < IGNORED), 0.0, float("-inf"))


def bias(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Lower the logits of tokens in proportion to their distance, as ALiBi does."""
    return -0.05 * (query - keys)


BENDS = {"window": window, "without-first": without_first, "bias": bias}


def long_window(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Mask tokens 60 or more positions back."""
    return torch.where(query - keys < 60, 0.0, float("-inf"))


def hole(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Mask tokens 50 to 89 for all tokens from token 90 on."""
    return torch.where((keys < 50) | (keys >= 90) | (query < 90), 0.0, float("-inf"))


def far_bias(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Lower the logits of tokens more than REACH positions back, in proportion to the further distance."""
    return -0.05 * (query - keys - REACH).clamp(min=0)


BEYOND = {"window": long_window, "hole": hole, "bias": far_bias}
"""Masks and biases that change nothing in a sequence of REACH tokens."""


def spares_the_end(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Mask tokens 60 or more positions back, for queries before position 260 only."""
    return torch.where((query - keys < 60) | (query >= 260), 0.0, float("-inf"))


class BentLlama(LlamaForCausalLM):
    """Llama whose forward pass adds a mask or bias of its own to the layers' mask."""

    bend = staticmethod(window)

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        query = torch.arange(before, before + input_ids.shape[1])[:, None]
        keys = torch.arange(before + input_ids.shape[1])[None]
        causal = torch.where(keys <= query, 0.0, float("-inf"))
        mask = (causal + type(self).bend(query, keys))[None, None]
        return super().forward(input_ids=input_ids, attention_mask=mask, past_key_values=past_key_values, **kwargs)


def bend(model: PreTrainedModel, how: str) -> PreTrainedModel:
    """Return a model with the same weights, and with the mask or bias of BENDS that `how` names."""
    kind = type(f"Bent{how}", (BentLlama,), {"bend": staticmethod(BENDS[how])})
    bent: PreTrainedModel = kind(model.config).eval()
    bent.load_state_dict(model.state_dict())
    return bent


def attention_bent_by(name: str, bend: Bend) -> type[PreTrainedModel]:
    """Return a Llama class whose attention implementation is sdpa with an additional mask or bias.

    The class registers its implementation with transformers, as any package may. If another attention replaces this
    implementation, the mask or bias is gone, too.
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
    """Return a model with the same weights, whose own attention implementation has the mask or bias `by`."""
    bent = attention_bent_by(name, by)(copy.deepcopy(model.config)).eval()
    bent.load_state_dict(model.state_dict())
    return bent


def bent_llama(how: str) -> PreTrainedModel:
    """Return the tiny Llama with the mask or bias of BENDS that `how` names."""
    return bend(FAMILIES["llama"](), how)
