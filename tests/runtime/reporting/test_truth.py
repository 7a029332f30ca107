"""The sums of a report's outputs, piece by piece, against one sum in float64."""

import pytest
import torch
from support.reference import assert_close

from sparsekv.runtime.reporting.truth import PIECE, weighted


@pytest.mark.parametrize("tokens", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_sum_to_the_whole(tokens: int, dtype: torch.dtype) -> None:
    Hk, G, Q, D = 2, 3, 5, 16
    weights = torch.randn(Hk, G, Q, tokens + 1).softmax(-1)[..., 1:]  # a view, as `joint_softmax` gives
    values = torch.randn(Hk, tokens, D).to(dtype)
    expected = torch.einsum("hgqt,htd->hgqd", weights.double(), values.double())
    assert_close(weighted(weights, values), expected, 1e-5)
