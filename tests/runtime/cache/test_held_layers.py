"""Layers that take rows at a place on the device do what those do that know their length."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.reference import assert_close
from support.small_layer import SmallLayer, small_layer, sparse_layer

from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.stored_layer import DenseLayer, StoredLayer
from sparsekv.runtime.methods.oracle import OracleSelector
from sparsekv.runtime.selection.interface import Budget, MiddleContext, Queries, Selection

HEADS, GROUP, SIZE, STEPS = 2, 3, 16, 4


class Noting(OracleSelector):
    """Notes what it is asked."""

    def __init__(self, context: MiddleContext):
        super().__init__(context)
        self.asked: list[tuple[torch.Tensor, torch.Tensor]] = []

    def select(self, asked: Queries, budget: Budget) -> Selection:
        self.asked.append((asked.positions(), asked.exact_logsumexp()))
        return super().select(asked, budget)


def _update(layers: list[StoredLayer], seed: int, tokens: int) -> list[torch.Tensor]:
    """Keys and values [Hk, tokens, D] that all of them have now."""
    rows = [normal(seed + part, 1, HEADS, tokens, SIZE) for part in (0, 1)]
    for layer in layers:
        layer.update(*rows)
    return [part[0] for part in rows]


def _compare(known: StoredLayer, held: StoredLayer, layer: SmallLayer, before: int, window: int | None) -> None:
    """An answer's steps with both, after `before` rows at once."""
    cache, scale = IndexCache([held]), layer.context.facts.softmax_scale
    for one in (known, held):
        one.rewind()
    if before:
        _update([known, held], 0, before)
    cache.reserve(before + 1, before + STEPS, capture=True)
    for step in range(STEPS):
        new = _update([known, held], 10 + step, 1)
        query = normal(50 + step, HEADS * GROUP, 1, SIZE)
        call = AttentionCall(0, query, *new, scale, None, window, None)
        expected, found = (one.attend(call) for one in (known, held))
        cache.end_step()
        cache.advance()
        assert_close(found, expected.double(), 1e-5)
        assert held.get_seq_length() == known.get_seq_length()
    cache.release()
    for rows, others in zip(known.exact_rows(), held.exact_rows(), strict=True):
        assert torch.equal(rows, others)


@settings(max_examples=10)
@given(before=st.integers(0, 300), again=st.integers(0, 10), seed=st.integers(0, 100))
def test_a_sparse_layer(before: int, again: int, seed: int) -> None:
    layer = small_layer(seed, middle=60)
    selectors = [Noting(layer.context) for _ in range(2)]
    known, held = (sparse_layer(layer, selector, Budget(9)) for selector in selectors)
    for tokens in (before, again):
        _compare(known, held, layer, tokens, None)
        assert held.read.total() == known.read.total()
        assert held.read.dense == known.read.dense
    asked, asked_when_held = (selector.asked for selector in selectors)
    assert len(asked) == 2 * STEPS
    for (positions, exact), (held_positions, held_exact) in zip(asked, asked_when_held, strict=True):
        assert torch.equal(positions, held_positions)
        assert_close(held_exact, exact.double(), 1e-6)


@settings(max_examples=15)
@given(
    before=st.integers(0, 300),
    again=st.integers(0, 60),
    window=st.none() | st.integers(1, 100),
    seed=st.integers(0, 100),
)
def test_a_dense_layer(before: int, again: int, window: int | None, seed: int) -> None:
    layer = small_layer(seed, middle=30)
    first = 0 if window is None else max(0, layer.split.tokens - window + 1)
    known, held = (DenseLayer(layer.keys[:, first:], layer.values[:, first:], first, window) for _ in range(2))
    for tokens in (before, again):
        _compare(known, held, layer, tokens, window)
