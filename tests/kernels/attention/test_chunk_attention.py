"""Attention of a chunk to itself and a few keys before it, against its definition in float64."""

import pytest
import torch
from support.kernel_runs import poisoned_memory
from support.reference import assert_close, random_attention, reference_attention

from sparsekv.kernels.attention.attention import causal_mask, chunk_attention, padded_attention

BEFORE = 60


def some_of(count: int, before: int, heads: int = 2) -> torch.Tensor:
    """Random rows [heads, count] int64 below `before`, none twice in a head."""
    return torch.rand(heads, before, generator=torch.Generator().manual_seed(count)).argsort(1)[:, :count]


def expected(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Output [Hq, Q, D] float64."""
    (Hk, T, _), chunk = keys.shape, query.shape[2]
    seen = torch.zeros(Hk, T, dtype=torch.bool).scatter_(1, chosen, True)
    seen[:, T - chunk :] = True
    mask = causal_mask(chunk, T, None, keys.device) & seen[:, None, None]
    return reference_attention(query, keys, values, 0.1, mask=mask).flatten(0, 1)


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 20, 45])
def test_queries_of_anything_change_nothing(count: int, G: int) -> None:
    query, keys, values = random_attention(G=G, Q=30, T=30 + BEFORE)
    chosen = some_of(count, BEFORE)
    with poisoned_memory():
        output = padded_attention(query.flatten(0, 1), keys, values, chosen, 0.1)
    assert_close(output, expected(query, keys, values, chosen), 1e-5)


@pytest.mark.parametrize("count", [0, 20, 45])
def test_a_chunk_attends_to_what_is_chosen_and_to_itself(count: int) -> None:
    query, keys, values = random_attention(Q=30, T=30 + BEFORE)
    chosen = some_of(count, BEFORE)
    output = chunk_attention(query.flatten(0, 1), keys, values, chosen, 0.1)
    assert_close(output, expected(query, keys, values, chosen), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("count", [1, 20, 300])
def test_a_chunk_on_a_gpu(count: int, D: int, dtype: torch.dtype, tolerance: float) -> None:
    query, keys, values = random_attention(Q=130, T=130 + 400, D=D, dtype=dtype)
    chosen = some_of(count, 400)
    moved = [tensor.cuda() for tensor in (query.flatten(0, 1), keys, values, chosen)]
    with poisoned_memory():
        output = chunk_attention(*moved, 0.1)
    assert_close(output.cpu(), expected(query, keys, values, chosen), tolerance)
