"""Attention of a chunk with few keys before it, against its definition in float64."""

import pytest
import torch
from support.reference import assert_close, random_attention, reference_attention

from sparsekv.kernels.attention import causal_mask
from sparsekv.kernels.chunk_attention import chunk_attention, padded_attention


def expected(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[Hq, Q, D] float64."""
    mask = causal_mask(query.shape[2], keys.shape[1], None, query.device)
    return reference_attention(query, keys, values, 0.1, mask=mask).flatten(0, 1)


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("before", [0, 1, 20, 45])
def test_queries_of_nothing_change_nothing(before: int, G: int) -> None:
    query, keys, values = random_attention(G=G, Q=30, T=30 + before)
    output = padded_attention(query.flatten(0, 1), keys, values, 0.1)
    assert_close(output, expected(query, keys, values), 1e-5)


@pytest.mark.parametrize("before", [0, 20, 45])
def test_a_chunk_attends_to_what_is_before_it(before: int) -> None:
    query, keys, values = random_attention(Q=30, T=30 + before)
    assert_close(chunk_attention(query.flatten(0, 1), keys, values, 0.1), expected(query, keys, values), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("before", [0, 20, 300])
def test_a_chunk_on_a_gpu(before: int, D: int, dtype: torch.dtype, tolerance: float) -> None:
    query, keys, values = random_attention(Q=130, T=130 + before, D=D, dtype=dtype)
    moved = [tensor.cuda() for tensor in (query.flatten(0, 1), keys, values)]
    assert_close(chunk_attention(*moved, 0.1).cpu(), expected(query, keys, values), tolerance)
