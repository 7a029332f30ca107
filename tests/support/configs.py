"""Configs of single methods, as tests name them."""

from typing import Any

from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.selection.interface import Method


def sparse(name: str, method: Method, budget: Budget, *, residual: bool = False, **others: Any) -> DecodeConfig:
    """The config of a method at a budget; `others` are fields of `DecodeConfig`."""
    return DecodeConfig(Form(name, "", method, residual), budget, **others)
