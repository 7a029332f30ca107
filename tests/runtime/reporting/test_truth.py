"""The sums of a report's outputs, piece by piece, against one sum in float64."""

import pytest
import torch
from support.reference import assert_close

from sparsekv.runtime.reporting.recall import PIECE, sum_in_pieces, weighted


@pytest.mark.parametrize("tokens", [1, 99, 100, 101, 377])
def test_pieces_sum_to_the_whole(tokens: int) -> None:
    weights = torch.randn(2, 15, tokens + 1).softmax(-1)[..., 1:]
    values = torch.randn(2, tokens, 16)
    assert_close(sum_in_pieces(weights, values, 100), weights.double() @ values.double(), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, PIECE, PIECE + 1, 3 * PIECE + 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_sums_as_float64_does(tokens: int, dtype: torch.dtype) -> None:
    weights = torch.randn(2, 3, 5, tokens + 1, device="cuda").softmax(-1)[..., 1:]
    values = torch.randn(2, tokens, 16, device="cuda").to(dtype)
    expected = torch.einsum("hgqt,htd->hgqd", weights.double(), values.double())
    assert_close(weighted(weights, values).cpu(), expected.cpu(), 1e-5)
