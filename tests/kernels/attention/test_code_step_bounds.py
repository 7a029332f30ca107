"""The compiled decode step over codes stays within its tensors, whatever the numbers in them are."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fenced_steps import code_steps
from support.spawned import run_together

from sparsekv.kernels.attention import code_step_numba
from sparsekv.kernels.attention.code_step_numba import BINS


@settings(max_examples=60)
@given(
    scores=st.lists(st.sampled_from([0.0, 1e-45, 0.5, 3e38]) | st.floats(0, 1, width=32), min_size=1, max_size=40),
    budget=st.integers(1, 40),
    threads=st.integers(1, 3),
)
def test_the_best_are_kept_in_order(scores: list[float], budget: int, threads: int) -> None:
    """Infinity is a score too; of equal ones the first are kept."""
    ranks, wanted = np.array(scores, np.float32).view(np.int32), min(budget, len(scores))
    bins, found = np.zeros((threads, BINS), np.int32), np.full(len(ranks), -1, np.int32)
    for thread in range(threads):
        ends = len(ranks) * thread // threads, len(ranks) * (thread + 1) // threads
        code_step_numba.count_ranks.py_func(ranks, *ends, bins[thread])
    lowest, listed = code_step_numba.lowest_of_last_bin.py_func(bins, wanted), ranks.copy()
    number = code_step_numba.list_ranks.py_func(listed, lowest, found)
    last = code_step_numba.last_rank.py_func(listed, number, lowest, wanted)
    code_step_numba.keep_best.py_func(listed, number, last, wanted, found)
    assert found[:wanted].tolist() == sorted(np.argsort(-ranks.astype(np.int64), kind="stable")[:wanted].tolist())


def test_nothing_is_read_past_a_tensor_whatever_its_numbers() -> None:
    run_together(code_steps, [()], 100)
