"""The compiled decode step stays within its tensors, whatever the numbers in them are."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.kernels.attention import cluster_step_numba

NAN = 0x7FC00000
bits = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=80, deadline=None)
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


STEPS = """
import sys
from dataclasses import replace

import torch
from support.fenced import fenced
from support.odd_numbers import KINDS, odd
from support.kernel_runs import with_threads
from kernels.attention.test_cluster_step import some_step

for behind in (False, True):
    for kind in KINDS:
        step = some_step(5, H=2, D=20, C=13, E=6)
        counted, clusters = step.clusters.counted, step.clusters
        held = (one[:, : counted.tokens] for one in step.rows)
        query, centroids, stands, *rows = odd(kind, step.query, counted.centroids, clusters.values, *held, *step.exact)
        centroids, stands, query, *rows = (fenced(one, behind=behind) for one in (centroids, stands, query, *rows))
        numbers = {name: fenced(getattr(counted, name), behind=behind) for name in ("counts", "log_counts")}
        starts = fenced(clusters.starts, behind=behind)
        counted = replace(counted, centroids=centroids, **numbers)
        clusters = replace(clusters, counted=counted, starts=starts, values=stands)
        assert clusters.compiled is not None
        for threads in (1, 3):
            with with_threads(threads):
                for replaced in (False, True):
                    pairs = {"rows": tuple(rows[:2]), "exact": tuple(rows[2:])}
                    replace(step, query=query, clusters=clusters, replace=replaced, **pairs).attend("compiled")
print("done")
"""


def test_nothing_is_read_past_a_tensor_whatever_its_numbers() -> None:
    tests = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, cwd=tests, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


PAST = """
import ctypes

import torch
from support.fenced import fenced

tensor = fenced(torch.arange(5), behind={behind})
assert tensor.tolist() == [0, 1, 2, 3, 4]
ctypes.c_long.from_address(tensor.data_ptr() + {past}).value
"""


@pytest.mark.parametrize(("behind", "past"), [(True, 40), (False, -8)])
def test_reading_past_a_fence_is_a_fault(behind: bool, past: int) -> None:
    code = PAST.format(behind=behind, past=past)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGSEGV
