"""Intervals against what theory says of them: width, coverage, pairing, and that contexts are drawn whole."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.runtime.evaluation.table import interval, paired_difference

NORMAL = 1.959964  # half of a 95% interval, in standard errors


def _clustered(random: np.random.Generator, contexts: int, questions: int, between: float, within: float) -> np.ndarray:
    """Normal scores [contexts, questions] of mean 0, alike within a context."""
    return between * random.normal(size=(contexts, 1)) + within * random.normal(size=(contexts, questions))


def test_one_question_a_context_gives_the_textbook_width() -> None:
    scores = np.random.default_rng(0).normal(size=(200, 1))
    found = interval(scores.tolist())
    error = scores.std() / math.sqrt(200)
    assert found.value == pytest.approx(scores.mean())
    assert (found.high - found.low) / 2 == pytest.approx(NORMAL * error, rel=0.05)


def test_two_stages_have_the_variance_that_they_should() -> None:
    """The mean over C drawn contexts with Q drawn questions each has the variance (between + mean within / Q) / C."""
    scores = _clustered(np.random.default_rng(1), 40, 5, between=1.0, within=2.0)
    variance = (scores.mean(1).var() + scores.var(1).mean() / 5) / 40
    found = interval(scores.tolist())
    assert (found.high - found.low) / 2 == pytest.approx(NORMAL * math.sqrt(variance), rel=0.06)


def test_questions_of_one_context_do_not_count_as_many() -> None:
    """Twenty questions that always score alike are worth no more than one."""
    alike = np.random.default_rng(2).normal(size=(30, 1))
    once, often = interval(alike.tolist()), interval(alike.repeat(20, 1).tolist())
    assert often.high - often.low == pytest.approx(once.high - once.low, rel=0.05)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    random, held, runs = np.random.default_rng(3), 0, 200
    for _ in range(runs):
        found = interval(_clustered(random, 20, 5, between=1.0, within=1.0).tolist())
        held += found.low <= 0 <= found.high
    # three standard errors of a share of 200 around 95%; drawing within contexts too makes it rather more than less
    assert held / runs > 0.95 - 3 * math.sqrt(0.95 * 0.05 / runs)


def test_pairing_takes_out_what_is_hard_for_both() -> None:
    random = np.random.default_rng(4)
    dense = _clustered(random, 20, 5, between=1.0, within=1.0)
    method = dense - 0.1 + 0.1 * random.normal(size=dense.shape)
    paired = paired_difference(method.tolist(), dense.tolist())
    alone, other = interval(method.tolist()), interval(dense.tolist())
    unpaired = math.hypot(alone.high - alone.low, other.high - other.low)
    assert paired.high - paired.low < 0.2 * unpaired
    assert paired.high < 0 < alone.high
    assert paired.value == pytest.approx(method.mean() - dense.mean())


@pytest.mark.parametrize(("contexts", "questions"), [(1, 2), (4, 5), (3, 100)])
def test_equal_scores_have_the_exact_binomial_interval(contexts: int, questions: int) -> None:
    """At its ends, n questions that all score alike have a probability of 2.5%."""
    right, wrong = ([[score] * questions] * contexts for score in (1.0, 0.0))
    found = interval(right, lambda mean: 100 * mean, limits=(0, 1))
    assert (found.value, found.high) == (100, 100)
    assert (found.low / 100) ** (contexts * questions) == pytest.approx(0.025)
    other = interval(wrong, lambda mean: 100 * mean, limits=(0, 1))
    assert (other.value, other.low, other.high) == (0, 0, pytest.approx(100 - found.low))


def test_equal_scores_between_the_limits_leave_room_on_both_sides() -> None:
    found = interval([[0.6] * 7, [0.6] * 3], limits=(0, 1))
    unseen = 1 - 0.025**0.1
    assert (found.low, found.high) == pytest.approx((0.6 - 0.6 * unseen, 0.6 + 0.4 * unseen))


def test_the_same_scores_may_differ_in_other_questions() -> None:
    scores = [[0.0, 1.0], [1.0, 0.5, 0.0]]
    found = paired_difference(scores, scores, limits=(0, 1))
    unseen = 1 - 0.025**0.2
    assert (found.value, found.low, found.high) == (0.0, pytest.approx(-unseen), pytest.approx(unseen))


def test_a_loss_of_all_questions_may_be_one_of_fewer() -> None:
    found = paired_difference([[0.0] * 5], [[1.0] * 5], limits=(0, 1))
    assert (found.value, found.low, found.high) == (-1, -1, pytest.approx(-1 + 2 * (1 - 0.025**0.2)))


def test_equal_scores_without_limits_have_no_interval() -> None:
    losses = [[2.0, 2.0], [2.0]]
    for found in (interval(losses, math.exp), paired_difference(losses, losses, math.exp)):
        assert (found.low, found.high) == (None, None)


def test_one_other_score_makes_the_interval_that_of_the_bootstrap() -> None:
    scores = [[1.0]] * 99 + [[0.0]]
    assert interval(scores, limits=(0, 1)) == interval(scores)


def test_unlike_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="same questions"):
        paired_difference([[1.0, 0.0]], [[1.0], [0.0]])


def test_a_summary_turns_the_ends_of_an_interval_with_it() -> None:
    losses = np.random.default_rng(5).uniform(2, 3, size=(10, 1)).tolist()
    plain, told = interval(losses), interval(losses, math.exp)
    assert (told.low, told.high) == pytest.approx((math.exp(plain.low), math.exp(plain.high)), rel=1e-3)


@settings(max_examples=40)
@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=5), st.integers(0, 9))
def test_an_interval_lies_within_the_scores_and_is_the_same_each_time(scores: list[list[float]], seed: int) -> None:
    found = interval(scores, seed=seed)
    flat = [score for one in scores for score in one]
    if found.low is None:
        assert max(flat) - min(flat) < 1e-7
    else:
        assert min(flat) - 1e-12 <= found.low <= found.high <= max(flat) + 1e-12
    assert found == interval(scores, seed=seed)
    assert found.value == pytest.approx(sum(flat) / len(flat))
