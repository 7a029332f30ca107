"""Configs of single methods, as tests name them."""

from typing import Any

from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec


def sparse(name: str, method: Method, budget: Budget, *, residual: bool = False, **others: Any) -> DecodeConfig:
    """The config of a method at a budget; `others` are fields of `DecodeConfig`."""
    return DecodeConfig(MethodSpec(name, "", method, residual), budget, **others)


def lossless(name: str, method: Method) -> DecodeConfig:
    """The config of a method that drafts, at a tenth of the tokens."""
    return sparse(name, method, Budget(0.1), question=Dense(), lossless=True)


LOSSLESS = {
    "dense": DecodeConfig(Dense(), question=Dense(), lossless=True),
    "codes": lossless("codes", Codes()),
    "multipole": lossless("multipole", Multipole()),
}
