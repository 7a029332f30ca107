"""The time that is left of a stage is estimated from its steps so far."""

from collections.abc import Callable

import pytest

from sparsekv.cli.common.console import Remaining


def _after(steps: int, of: int, at: Callable[[int], float], first: int = 0) -> Remaining:
    """The estimate after some steps, of which each number is done at a time."""
    now = 0.0
    remaining = Remaining(lambda: now)
    for done in range(first, steps + 1):
        now = at(done)
        remaining.show(done, of)
    return remaining


def test_nothing_is_told_before_the_first_step_and_at_the_end() -> None:
    assert Remaining().told() == ""
    assert _after(0, 10, float).told() == ""
    assert _after(10, 10, float).told() == ""


def test_a_step_that_outlasts_the_estimate_is_not_about_to_end() -> None:
    times = iter([0.0, 7.0, 14.0])
    remaining = Remaining(lambda: next(times))
    remaining.show(0, 2)
    remaining.show(1, 2)
    assert remaining.told() == ""  # 7 s were expected, and 7 s have passed


def test_even_steps_take_as_long_as_before() -> None:
    assert _after(1, 10, lambda done: 7.0 * done).told() == "about 63 s left"
    assert _after(5, 10, lambda done: 120.0 * done).told() == "about 10 min left"
    assert _after(7, 10, lambda done: 7.0 * done, first=4).seconds() == pytest.approx(21)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_steps_that_take_longer_and_longer_are_foreseen(share: float) -> None:
    """Even where all the work grows with the square of the tokens."""

    def at(done: int) -> float:
        return (1 - share) * 10 * done + share * done * done

    assert _after(5, 40, at).seconds() == pytest.approx(at(40) - at(5), rel=0.05)


def test_a_slow_first_step_promises_no_speed_up_without_end() -> None:
    seconds = _after(4, 40, lambda done: done + 20.0 * (done > 0)).seconds()
    assert seconds == pytest.approx(36)


def test_it_begins_anew_with_the_next_document() -> None:
    remaining = _after(10, 10, float)
    remaining.show(0, 10)
    assert remaining.told() == ""
