"""A decode step over clusters, compiled and in torch, against a choice and one softmax in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cluster_steps import FORMS, some_step
from support.kernel_runs import poisoned_memory, with_threads
from support.random_tensors import normal
from support.reference import assert_close
from support.spawned import run_together
from support.without_numba import check_step

from sparsekv.kernels.clusters.cluster_choice import logs_and_shares
from sparsekv.kernels.common.on_cpu import compiled_kernels

every_form = pytest.mark.parametrize("form", FORMS)


@given(
    seed=st.integers(0, 1000),
    H=st.integers(1, 4),
    G=st.integers(1, 8),
    D=st.sampled_from([20, 64, 96, 128, 256]),
    C=st.integers(1, 60),
    E=st.integers(1, 40),
    share=st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
    softcap=st.sampled_from([None, 3.0]),
    stands=st.booleans(),
    has_sinks=st.booleans(),
    threads=st.integers(1, 3),
    form=st.sampled_from(sorted(FORMS)),
)
@settings(max_examples=60)
def test_a_step_gives_what_its_definition_gives(
    seed: int,
    H: int,
    G: int,
    D: int,
    C: int,
    E: int,
    share: float,
    softcap: float | None,
    stands: bool,
    has_sinks: bool,
    threads: int,
    form: str,
) -> None:
    step = some_step(seed, H=H, G=G, D=D, C=C, E=E, share=share, softcap=softcap)
    step = replace(step, replace=stands, sinks=normal(seed, H, G) if has_sinks else None)
    with with_threads(threads), poisoned_memory():
        output = step.attend(form)
    assert_close(output, step.expected(), 5e-6)


def test_numba_is_there_to_be_tested() -> None:
    assert compiled_kernels("cluster_step_numba") is not None
    assert some_step().clusters.compiled is not None


@every_form
def test_nothing_but_chosen_rows_and_centroids_may_be_attended(form: str) -> None:
    """With no exact row, and more threads than rows."""
    step = some_step(C=3, E=0, share=0.1)
    with with_threads(3), poisoned_memory():
        assert_close(step.attend(form), step.expected(), 5e-6)


@every_form
@pytest.mark.parametrize("clusters", [1, 20_000])
def test_flat_attention_to_very_many_rows_sums_up_to_their_mean(form: str, clusters: int) -> None:
    """A single float32 sum of a hundred thousand equal numbers is wrong by 0.03%. Runs of rows are short, or long."""
    step = some_step(H=1, G=2, D=4, C=20_000, share=1.0)
    assert step.budget > 70_000
    if clusters == 1:
        counts = torch.zeros_like(step.clusters.counted.counts)
        counts[:, 0] = step.budget
        logs, shares = logs_and_shares(counts)
        counted = replace(step.clusters.counted, counts=counts, log_counts=logs[:, None], shares=shares)
        step = replace(step, clusters=replace(step.clusters, counted=counted, starts=0 * step.clusters.starts))
    rows, exact = ((keys, torch.full_like(values, 1 / 3)) for keys, values in (step.rows, step.exact))
    step = replace(step, query=torch.zeros_like(step.query), rows=rows, exact=exact, replace=False)
    assert_close(step.attend(form), torch.full_like(step.query, 1 / 3), 4e-6)


@every_form
def test_of_clusters_that_agree_the_output_is_that_of_some_of_them(form: str) -> None:
    """All scores are equal, and so are all rows, so that the choice does not matter."""
    step = some_step(H=1)
    counted = step.clusters.counted
    alike = replace(counted, centroids=torch.zeros_like(counted.centroids))
    rows = torch.zeros_like(step.rows[0]), torch.ones_like(step.rows[1])
    step = replace(step, clusters=replace(step.clusters, counted=alike), rows=rows, replace=False)
    assert_close(step.attend(form), step.expected(), 5e-6)


@every_form
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("far", [3e3, -3e3])
def test_logits_far_from_each_other_neither_overflow_nor_vanish(form: str, far: float, share: float) -> None:
    """All clusters are chosen, or none: between, clusters whose score is 0 in float32 would have no order."""
    step = some_step(seed=4, share=share)
    counted = step.clusters.counted
    centroids = counted.centroids.clone()
    centroids[:, 5:] *= far
    step = replace(step, clusters=replace(step.clusters, counted=replace(counted, centroids=centroids)))
    assert_close(step.attend(form), step.expected(), 1e-4)


@every_form
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_lost(form: str, bad: float) -> None:
    """NaN must reach the output, so that a broken model does not produce text, nor a broken step a timing."""
    step = some_step()
    step.query[1, 2, 7] = bad
    assert not bool(step.attend(form)[1, 2].isfinite().any())
    step = some_step()
    step.exact[0][2, 3] = torch.nan
    assert not bool(step.attend(form)[2].isfinite().any())


def test_a_step_is_repeated_to_the_last_bit_by_as_many_threads() -> None:
    step = some_step(C=300)
    for threads in (1, 2, 3):
        with with_threads(threads):
            assert torch.equal(step.attend("compiled"), step.attend("compiled"))


def test_half_precision_and_gradients_go_another_way() -> None:
    step = some_step(dtype=torch.bfloat16)
    assert step.clusters.compiled is None
    assert step.attend("compiled").dtype == torch.bfloat16
    assert_close(step.attend("compiled"), step.expected(), 2e-2)
    step = some_step()
    step.query.requires_grad_()
    assert step.attend("compiled").grad_fn is not None


def test_heads_of_another_layout_go_another_way() -> None:
    """Rows that are not contiguous, such as every other row of a buffer, are computed in torch."""
    step = some_step()
    apart = tuple(held.repeat_interleave(2, 1)[:, ::2] for held in step.exact)
    moved = replace(step, exact=(apart[0], apart[1]))
    assert_close(moved.attend("compiled"), step.expected(), 5e-6)


def test_without_numba_a_step_is_one_of_torch() -> None:
    run_together(check_step, [()], 100)
