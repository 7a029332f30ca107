"""Rows that stay in 8 bits: the same as restored ones, in any layout, and as kernels read them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.reference import assert_close

from sparsekv.formats.index.context_rows import context_rows, quantise
from sparsekv.kernels.attention.attention import Segment, attend
from sparsekv.kernels.attention.decode_attention import decode_attention
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.kernels.common.kernel_inputs import RunRows
from sparsekv.runtime.cache.kv_store import Int8Middle, MemoryRows, of_tokens
from sparsekv.runtime.cache.stored_layer import DenseLayer, DenseLayerIn8Bits, DynamicSlot

HK, TOKENS, D = 2, 90, 16
CPU = torch.device("cpu")


@pytest.fixture
def stored() -> dict[str, torch.Tensor]:
    return quantise(3 + normal(0, HK, TOKENS, D), normal(1, HK, TOKENS, D))


def _order(seed: int, rows: int) -> torch.Tensor:
    return torch.rand(HK, rows, generator=torch.Generator().manual_seed(seed)).argsort(1)


@given(st.integers(0, 99), st.integers(0, 60), st.integers(0, 20))
@settings(max_examples=20)
def test_they_are_what_restored_rows_are(seed: int, start: int, added: int) -> None:
    """After an append too: what is added is rounded, and what was there keeps its bits."""
    stored = quantise(3 + normal(seed, HK, TOKENS, D), normal(1, HK, TOKENS, D))
    order, middle = _order(seed, 70), slice(10, 80)
    keys, values = context_rows(stored, torch.float32).part(middle)
    rows, restored = Int8Middle(of_tokens(stored, middle), order, torch.float32), MemoryRows(keys, values, order, CPU)
    new = normal(seed + 1, HK, added, D), normal(seed + 2, HK, added, D)
    rounded = context_rows(quantise(*new, like=stored), torch.float32).part(slice(None)) if added else new
    after = _order(seed + 3, 70 - start + added)
    rows.rewrite(start, new if added else None, after)
    restored.rewrite(start, rounded if added else None, after)
    assert rows.used == restored.used == 70 + added
    some = torch.randint(rows.used, (HK, 25), generator=torch.Generator().manual_seed(seed))
    for got, expected in ((rows.gather(some), restored.gather(some)), (rows.from_row(5), restored.from_row(5))):
        assert all(torch.equal(*both) for both in zip(got, expected, strict=True))
    assert rows.in_place().keys.dtype == torch.int8


def test_kernels_read_them_where_they_lie(stored: dict[str, torch.Tensor]) -> None:
    rows, query = Int8Middle(stored, _order(4, TOKENS), torch.float32), normal(5, HK, 3, D)
    placed, chosen = rows.in_place(), _order(6, TOKENS)[:, :30]
    nothing = torch.empty(HK, 0, D)
    runs = RunRows(placed.keys, placed.values, chosen, None, 30, scales=placed.scales)
    output = decode_attention(query, runs, (nothing, nothing), (), 0.3)
    expected = attend(query[:, :, None].double(), [Segment(*(one.double() for one in rows.gather(chosen)))], 0.3)
    assert_close(output, expected[:, :, 0], 1e-6)


def _both(stored: dict[str, torch.Tensor]) -> tuple[DenseLayer, DenseLayer]:
    """Dense layers over rows in 8 bits, and over the same rows restored."""
    restored = context_rows(stored, torch.float32).part(slice(None))
    return DenseLayerIn8Bits(stored, torch.empty(HK, 0, D)), DenseLayer(*restored)


@pytest.mark.parametrize("queries", [1, 4])
def test_a_dense_layer_attends_as_over_restored_rows(stored: dict[str, torch.Tensor], queries: int) -> None:
    layers = _both(stored)
    query, keys, values = normal(7, 3 * HK, queries, D), normal(8, 1, HK, queries, D), normal(9, 1, HK, queries, D)
    call, outputs = AttentionCall(0, query, keys[0], values[0], 0.3, None, None, None), []
    for layer in layers:
        layer.update(keys, values)
        assert layer.get_seq_length() == TOKENS + queries
        outputs.append(layer.attend(call))
    assert_close(outputs[0], outputs[1].double(), 1e-6)


def test_a_dense_layer_decodes_at_a_step_row(stored: dict[str, torch.Tensor]) -> None:
    layers = _both(stored)
    call, outputs = AttentionCall(0, normal(1, 3 * HK, 1, D), *[normal(2, HK, 1, D)] * 2, 0.3, None, None, None), []
    for layer in layers:
        step_row = DynamicSlot(torch.tensor([0]), torch.tensor([1], dtype=torch.int32))
        layer.reserve(step_row, 3)
        layer.update(call.keys[None], call.values[None])
        outputs.append(layer.attend(call))
    assert_close(outputs[0], outputs[1].double(), 1e-6)
