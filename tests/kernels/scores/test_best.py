"""The best tokens by score: as many as are asked for, none below one that is left out."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.kernels.scores.logits import best_tokens


@given(seed=st.integers(0, 10**6), middle=st.integers(1, 300), share=st.floats(0, 1), ties=st.booleans())
def test_the_best_by_score(seed: int, middle: int, share: float, ties: bool) -> None:
    scores = torch.rand(2, middle, 3, generator=torch.Generator().manual_seed(seed)).transpose(1, 2)
    scores = (4 * scores).round() if ties else scores
    tokens = max(1, round(share * middle))
    best = best_tokens(scores, tokens)
    assert best.shape == (2, 3, tokens)
    assert all(len(row.unique()) == tokens for row in best.flatten(0, 1))
    assert torch.equal(scores.gather(-1, best).sort(-1, descending=True).values, scores.topk(tokens, -1).values)
