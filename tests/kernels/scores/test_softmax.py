"""A softmax and its log-sum-exp against their definition in float64."""

import pytest
import torch
from support.reference import assert_close

from sparsekv.kernels.scores.logits import softmax_beside, softmax_with_logsumexp


@pytest.mark.parametrize("spread", [0.01, 4, 60])
@pytest.mark.parametrize("T", [1, 7, 500])
def test_weights_and_denominator(T: int, spread: float) -> None:
    logits = spread * torch.randn(3, 5, T, generator=torch.Generator().manual_seed(T))
    logits[0, :, 1:] = -torch.inf
    weights, total = softmax_with_logsumexp(logits)
    assert_close(weights, logits.double().softmax(-1), 1e-5)
    assert_close(total, logits.double().logsumexp(-1), 1e-5)
    assert torch.equal(total[0], logits[0, :, 0])


def test_weights_beside_others() -> None:
    logits = 20 * torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
    weights = logits.double().softmax(-1)
    assert_close(softmax_beside(logits[..., :25], logits[..., 25:].logsumexp(-1)), weights[..., :25], 1e-5)
    nothing = torch.full((2, 3), -torch.inf)
    assert_close(softmax_beside(logits, nothing), weights, 1e-5)
