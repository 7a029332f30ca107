"""Tests of the tensors and messages that ranks send each other, between two processes over gloo."""

from multiprocessing import get_context
from pathlib import Path

import pytest
from support.two_given import first, second


@pytest.mark.slow
def test_any_tensors_are_given_to_the_first_rank_while_threads_tell_it_something_else(tmp_path: Path) -> None:
    spawn = get_context("spawn")
    both = [spawn.Process(target=rank, args=(tmp_path,)) for rank in (first, second)]
    for one in both:
        one.start()
    for one in both:
        one.join(120)
    assert [one.exitcode for one in both] == [0, 0]
