"""The keyword argument with which a model's forward pass and its `generate` take a cache."""

from collections.abc import Callable
from functools import lru_cache
from inspect import signature
from typing import Any

from transformers import Cache, PreTrainedModel


def cache_argument(model: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """The keyword argument that passes a cache: `cache` from transformers 5.24 on, before that `past_key_values`."""
    return {_keyword(type(model).forward): cache}


def with_cache(model: PreTrainedModel, cache: Cache) -> dict[str, Any]:
    """Keyword arguments of a forward pass that attends to a cache and appends to it."""
    return {**cache_argument(model, cache), "use_cache": True}


@lru_cache(maxsize=16)
def _keyword(forward: Callable[..., Any]) -> str:
    return "cache" if "cache" in signature(forward).parameters else "past_key_values"
