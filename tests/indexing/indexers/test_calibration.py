"""The curve of thresholds against what they keep, compared with sorting every score."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal

from sparsekv.indexing.indexers.interface import KeepCurve

ONE_BIN = 2.0**0.01
properties = settings(max_examples=40)


def _scores(seed: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Scores [2, 3, 40] spread over many magnitudes and counts [2, 1, 40] of altogether the same M a head."""
    scores = ((4 * normal(seed, 2, 3, 40)).exp() / 1000).clamp(max=1)
    counts = torch.randint(0, 5, (2, 1, 40), generator=torch.Generator().manual_seed(seed))
    counts[:, :, 0] += 200 - counts.sum(2)
    return scores, counts, 200


def _share(scores: torch.Tensor, counts: torch.Tensor, tokens: int, threshold: float) -> float:
    kept = counts.expand_as(scores)[scores >= threshold].sum()
    return float(kept) / (tokens * scores.shape[0] * scores.shape[1])


@properties
@given(seed=st.integers(0, 10**6), keep=st.floats(0.001, 1.0))
def test_threshold_keeps_at_least_the_target_and_a_bin_higher_keeps_less(seed: int, keep: float) -> None:
    scores, counts, tokens = _scores(seed)
    curve = KeepCurve()
    curve.add(scores, counts, tokens)
    threshold = curve.threshold(keep)
    assert _share(scores, counts, tokens, threshold) >= keep - 1e-9
    if threshold > 0:
        # Rounding may put a score into the bin beside its own: one more bin leaves no doubt.
        assert _share(scores, counts, tokens, threshold * ONE_BIN**2) < keep


@properties
@given(seed=st.integers(0, 10**6), threshold=st.floats(1e-9, 1.0))
def test_share_above_a_threshold_is_the_counted_one_to_a_bin(seed: int, threshold: float) -> None:
    scores, counts, tokens = _scores(seed)
    curve = KeepCurve()
    curve.add(scores, counts, tokens)
    lowest, highest = (_share(scores, counts, tokens, threshold * ONE_BIN**bins) for bins in (2, -2))
    assert lowest - 1e-9 <= curve.share_above(threshold) <= highest + 1e-9


@properties
@given(seed=st.integers(0, 10**6))
def test_points_fall_in_threshold_as_they_rise_in_share(seed: int) -> None:
    curve = KeepCurve()
    curve.add(*_scores(seed))
    shares, thresholds = np.array(curve.points()).T
    assert (np.diff(shares) > 0).all()
    assert (np.diff(thresholds) <= 0).all()
    assert (shares[0], shares[-1], thresholds[-1]) == (1e-6, 1.0, 0.0)


def test_order_and_pieces_of_what_is_added_do_not_matter() -> None:
    scores, counts, tokens = _scores(0)
    whole, pieces = KeepCurve(), KeepCurve()
    whole.add(scores, counts, tokens)
    for head in (1, 0):
        for query in (2, 0, 1):
            pieces.add(scores[head : head + 1, query : query + 1], counts[head : head + 1], tokens)
    assert whole.points() == pieces.points()


@pytest.mark.parametrize("score", [1.0, 2.0**-10, 1e-16])
def test_equal_scores_are_kept_together(score: float) -> None:
    curve = KeepCurve()
    curve.add(torch.full((1, 2, 8), score), torch.full((1, 1, 8), 3), 24)
    threshold = curve.threshold(0.01)
    assert score / ONE_BIN**2 < threshold <= score * (1 + 1e-6)
    assert curve.share_above(threshold) == 1


def test_scores_too_low_to_tell_apart_are_all_kept_or_none() -> None:
    curve = KeepCurve()
    curve.add(torch.tensor([[[0.5, 1e-30, 0.0]]]), torch.ones(1, 1, 3), 3)
    assert curve.threshold(0.3) > 0.4
    assert curve.threshold(0.6) == 0


def test_what_no_score_decides_is_reached_by_no_threshold_above_zero() -> None:
    curve = KeepCurve()
    curve.add(torch.ones(1, 1, 4), torch.ones(1, 1, 4), 8)
    assert curve.threshold(0.4) > 0
    assert curve.threshold(0.6) == 0
