"""Engines that decode several questions together, and decode steps as a GPU takes them."""

import pytest
import torch

from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.answer import Answer
from sparsekv.runtime.decoding.engine import Engine, Request, pack
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.sampling import Sampling


def packed(index: OpenIndex, cache: IndexCache, slots: int) -> Engine:
    return Engine(index, pack(cache, slots))


def answered(engine: Engine, asked: list[torch.Tensor], sampling: Sampling) -> dict[int, Answer]:
    """The answers by the numbers of their questions."""
    return dict(engine.answers([Request(one, sampling) for one in asked]))


def count_rows_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each decode step of a single sequence write its row to a slot whose number lies on the device."""
    plain = IndexCache.reserve

    def reserve(cache: IndexCache, needed: int, most: int, *, capture: bool) -> bool:
        return plain(cache, needed, most, capture=True)

    monkeypatch.setattr(IndexCache, "reserve", reserve)
