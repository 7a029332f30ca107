"""The collector of cyclic garbage rests while a command starts, and no longer."""

import gc
from collections.abc import Iterator

import pytest

from sparsekv.cli.common import process
from sparsekv.cli.common.process import rest_collector, resume_collector


@pytest.fixture(autouse=True)
def usual() -> Iterator[tuple[int, int, int]]:
    """The threshold of a program; tests have a higher one."""
    of_tests, usual = gc.get_threshold(), process._USUAL
    gc.set_threshold(*usual)
    yield usual
    gc.set_threshold(*of_tests)
    gc.unfreeze()


def test_it_rests_and_resumes(usual: tuple[int, int, int]) -> None:
    rest_collector()
    assert gc.isenabled()
    assert gc.get_threshold()[0] > 10 * usual[0]
    resume_collector()
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() > 0


def test_one_that_works_is_left_alone(usual: tuple[int, int, int]) -> None:
    """A program that calls a command in its own process keeps its own collector, and its garbage."""
    gc.set_threshold(usual[0] + 1)
    resume_collector()
    assert gc.get_threshold()[0] == usual[0] + 1
    assert gc.get_freeze_count() == 0
