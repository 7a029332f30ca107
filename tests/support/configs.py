"""Decoding configs of single methods, for tests."""

from typing import Any

from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec


def sparse(name: str, method: Method, budget: Budget, *, residual: bool = False, **others: Any) -> DecodeConfig:
    """Return the config of a method at a budget; `others` are fields of `DecodeConfig`."""
    return DecodeConfig(MethodSpec(name, "", method, residual), budget, **others)


def lossless(name: str, method: Method) -> DecodeConfig:
    """Return the config of lossless decoding, with drafts by a method at a budget of a tenth of the tokens."""
    return sparse(name, method, Budget(0.1), question=Dense(), lossless=True)


LOSSLESS = {
    "dense": DecodeConfig(Dense(), question=Dense(), lossless=True),
    "codes": lossless("codes", Codes()),
    "multipole": lossless("multipole", Multipole()),
}
