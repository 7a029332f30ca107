"""Engines that decode several questions together, and stand-ins on a CPU for a GPU's decode steps."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from sparsekv.runtime.cache.buffers import Run
from sparsekv.runtime.cache.index_cache import IndexCache, SequenceCache
from sparsekv.runtime.cache.packed_cache import PackedCache
from sparsekv.runtime.decoding.answer import Answer, Sampling
from sparsekv.runtime.decoding.engine import Engine, Request, pack
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.step import DecodeStep


def packed(index: OpenIndex, cache: IndexCache, slots: int) -> Engine:
    return Engine(index, pack(cache, slots))


def answered(engine: Engine, asked: list[torch.Tensor], sampling: Sampling) -> dict[int, Answer]:
    """Return the answers by the index of their question."""
    return dict(engine.answers([Request(one, sampling) for one in asked]))


def count_rows_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each decode step of a single sequence write its row to a slot whose index is on the device."""
    plain = IndexCache.reserve

    def reserve(cache: IndexCache, needed: int, most: int, *, capture: bool) -> bool:
        return plain(cache, needed, most, capture=True)

    monkeypatch.setattr(IndexCache, "reserve", reserve)


class ReplayedStep:
    """Replacement of a step's CUDA graph on a CPU: runs the step again, over the buffers of the capture."""

    def __init__(self, cache: SequenceCache, step: Run):
        self.cache, self.step = cache, step
        owners: Sequence[object]
        owners = [layer.own for layer in cache.packed] if isinstance(cache, PackedCache) else cache.stored_layers
        names = ("keys", "values", "joined")
        self.captured = [(one, name, getattr(one, name)) for one in owners for name in names if hasattr(one, name)]
        self.logits = step().clone()

    def replay(self) -> None:
        now = [(one, name, getattr(one, name)) for one, name, _ in self.captured]
        counts = [read.step for read in self.cache.reads]
        for one, name, captured in self.captured:
            setattr(one, name, captured)
        self.logits.copy_(self.step())
        for one, name, before in now:
            setattr(one, name, before)
        for read, count in zip(self.cache.reads, counts, strict=True):
            read.step = count


def capture_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make decode steps of engines that are created from now on be captured and replayed, as on a GPU."""
    made = SequenceCache.__init__

    def init(cache: SequenceCache, *args: Any, **more: Any) -> None:
        made(cache, *args, **more)
        cache.capturing = True

    def captured(step: DecodeStep, run: Run) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        changed = step.cache.counters()
        before = [tensor.clone() for tensor in changed]
        replayed = ReplayedStep(step.cache, run)
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        return cast("torch.cuda.CUDAGraph", replayed), replayed.logits

    monkeypatch.setattr(SequenceCache, "__init__", init)
    monkeypatch.setattr(DecodeStep, "_captured", captured)
