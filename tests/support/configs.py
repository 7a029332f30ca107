"""Configs of single methods, as tests name them."""

from typing import Any

from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec


def sparse(name: str, method: Method, budget: Budget, *, residual: bool = False, **others: Any) -> DecodeConfig:
    """The config of a method at a budget; `others` are fields of `DecodeConfig`."""
    return DecodeConfig(MethodSpec(name, "", method, residual), budget, **others)
