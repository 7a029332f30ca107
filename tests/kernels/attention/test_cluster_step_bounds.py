"""The compiled decode step stays within its tensors, whatever the numbers in them are."""

import signal
from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fenced_steps import cluster_steps, read_past
from support.spawned import exit_codes, run_together

from sparsekv.kernels.attention import cluster_step_numba

NAN = 0x7FC00000
bits = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=80)
@given(
    clusters=st.lists(st.tuples(bits | st.sampled_from([0, NAN, -1, 2**31 - 1]), st.integers(0, 9)), min_size=1),
    budget=st.integers(0, 300),
)
def test_the_budget_is_filled_whatever_bits_scores_have(clusters: list[tuple[int, int]], budget: int) -> None:
    """Scores are compared as integers only, so that NaN needs no special treatment."""
    ranks, counts = np.array(clusters, np.int32).T.copy()
    lengths = np.full_like(counts, -1)
    cluster_step_numba._fill.py_func(ranks, counts, min(budget, int(counts.sum())), lengths)
    assert ((lengths >= 0) & (lengths <= counts)).all()
    assert lengths.sum() == min(budget, counts.sum())


def test_nothing_is_read_past_a_tensor_whatever_its_numbers() -> None:
    run_together(cluster_steps, [()], 100)


def test_reading_past_a_fence_is_a_fault() -> None:
    assert exit_codes(partial(read_past, behind=True), [(40,)], 100) == [-signal.SIGSEGV]
    assert exit_codes(partial(read_past, behind=False), [(-8,)], 100) == [-signal.SIGSEGV]
