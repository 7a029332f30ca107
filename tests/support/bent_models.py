"""Tiny models whose attention has a mask or a bias of its own, which only transformers' own attention gets."""

from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from .tiny_models import FAMILIES

WINDOW = 24
IGNORED = 12


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


def bent_llama(how: str) -> PreTrainedModel:
    """The tiny Llama, bent."""
    return bend(FAMILIES["llama"](), how)
