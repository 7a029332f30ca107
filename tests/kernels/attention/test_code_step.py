"""A decode step over codes, compiled and in torch, against scores, the best of them, and one softmax in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.code_steps import FORMS, SCALE, some_step
from support.kernel_runs import with_threads
from support.random_tensors import normal
from support.reference import assert_close, reference_attention

from sparsekv.kernels.attention.cpu_steps import SPARE, choose_by_codes
from sparsekv.kernels.common.on_cpu import compiled_kernels

every_form = pytest.mark.parametrize("form", FORMS)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    H=st.integers(1, 4),
    G=st.integers(1, 9),
    shape=st.sampled_from([(20, 4), (64, 8), (64, 7), (96, 12), (128, 16), (256, 32), (48, 3)]),
    C=st.integers(1, 60),
    E=st.integers(0, 40),
    named=st.sampled_from([256, 90]),
    share=st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
    softcap=st.sampled_from([None, 3.0]),
    stands=st.booleans(),
    has_sinks=st.booleans(),
    threads=st.integers(1, 3),
)
def test_a_step_gives_what_its_definition_gives(
    seed: int,
    H: int,
    G: int,
    shape: tuple[int, int],
    C: int,
    E: int,
    named: int,
    share: float,
    softcap: float | None,
    stands: bool,
    has_sinks: bool,
    threads: int,
) -> None:
    D, m = shape
    D -= D % m
    step = some_step(seed, H=H, G=G, D=D, m=m, C=C, E=E, named=named, share=share, softcap=softcap)
    step = replace(step, replace=stands, sinks=normal(seed, H, G) if has_sinks else None)
    assume(step.is_clear())
    with with_threads(threads):
        for form in FORMS:
            assert_close(step.attend(form), step.expected(), 1e-5)
        chosen = step.choose()
    assert torch.equal(chosen, step.scores().topk(step.budget).indices.sort().values)


def test_numba_is_there_to_be_tested() -> None:
    assert compiled_kernels("code_step_numba") is not None
    assert some_step().codes.compiled is not None


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_more_rows_than_a_block_and_more_threads_than_heads(threads: int) -> None:
    step = some_step(7, H=2, C=900, share=0.02)
    assert step.codes.codes.shape[1] > 1000
    assert step.is_clear()
    with with_threads(threads):
        assert_close(step.attend(), step.expected(), 1e-5)
        assert torch.equal(step.attend(), step.attend())


@pytest.mark.parametrize("threads", [1, 3])
def test_scratch_memory_suffices_while_exact_rows_are_appended(threads: int) -> None:
    """Sizes are kept from step to step, and for another budget or another number of threads they are computed anew."""
    step = some_step()
    compiled = step.codes.compiled
    assert compiled is not None
    for budget in (1, step.budget):
        job = compiled.prepare(step.query, budget)
        for exact in (0, 1, SPARE - 1, SPARE, SPARE + 1, 3 * SPARE, 2):
            job.E = exact
            for number in (1, threads):
                assert compiled._scratch_size(job, number) >= compiled.kernel.scratch_size(job, number)


@every_form
@pytest.mark.parametrize("rows", [1, 2])
def test_one_token_and_no_exact_row(rows: int, form: str) -> None:
    step = some_step(3, C=1, E=0)
    codes = step.codes
    few = replace(codes, codes=codes.codes[:, :rows].contiguous(), labels=0 * codes.labels[:, :rows].contiguous())
    few = replace(few, counts=torch.full_like(codes.counts, rows), masses=0 * codes.masses)
    step = replace(step, codes=few, budget=rows)
    for threads in (1, 3):
        with with_threads(threads):
            assert_close(step.attend(form), step.expected(), 1e-5)


@every_form
def test_a_budget_of_everything_is_dense_attention(form: str) -> None:
    step = some_step(share=1.0)
    M = step.budget
    keys, values = (torch.cat([held[:, :M], always], 1) for held, always in zip(step.rows, step.exact, strict=True))
    assert_close(step.attend(form), reference_attention(step.query[:, :, None], keys, values, SCALE)[:, :, 0], 1e-5)


@every_form
def test_flat_attention_to_very_many_rows_sums_up_to_their_mean(form: str) -> None:
    """A single float32 sum of a hundred thousand equal numbers is wrong by 0.03%."""
    step = some_step(H=1, G=2, D=4, m=1, C=20_000, share=1.0)
    assert step.budget > 70_000
    rows, exact = ((keys, torch.full_like(values, 1 / 3)) for keys, values in (step.rows, step.exact))
    step = replace(step, query=torch.zeros_like(step.query), rows=rows, exact=exact, replace=False)
    assert_close(step.attend(form), torch.full_like(step.query, 1 / 3), 4e-6)


@every_form
def test_of_rows_that_agree_the_output_is_that_of_some_of_them(form: str) -> None:
    """All codes are equal, and so are all rows, so that the choice does not matter, but for its size."""
    step = some_step()
    same = replace(step.codes, codes=torch.full_like(step.codes.codes, 7))
    rows = torch.zeros_like(step.rows[0]), torch.ones_like(step.rows[1])
    step = replace(step, codes=same, rows=rows, replace=False)
    assert_close(step.attend(form), step.expected(), 1e-5)


@every_form
@pytest.mark.parametrize("far", [3e3, -3e3])
def test_logits_far_above_or_below_what_the_clusters_weigh(form: str, far: float) -> None:
    """All rows are attended: between, scores that are 0, or as large as scores can be, have no order."""
    step = some_step(4, share=1.0)
    step = replace(step, codes=replace(step.codes, books=far * step.codes.books))
    assert_close(step.attend(form), step.expected(), 1e-5)
    assert bool(replace(step, budget=20).attend(form).isfinite().all())


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


def test_half_precision_gradients_and_other_layouts_go_another_way() -> None:
    """Half precision and gradients are computed in torch. The rows that are not contiguous are every other row of a
    buffer."""
    step = some_step()
    assert replace(step.codes, values=step.codes.values.half()).compiled is None
    apart = tuple(held.repeat_interleave(2, 1)[:, ::2] for held in step.exact)
    assert_close(replace(step, exact=(apart[0], apart[1])).attend(), step.expected(), 1e-5)
    half = replace(step, query=step.query.half(), budget=step.codes.codes.shape[1])
    assert half.attend().dtype == torch.float16
    assert_close(half.attend(), half.expected(), 2e-3)
    wanted = step.query.clone().requires_grad_()
    assert replace(step, query=wanted).attend().grad_fn is not None
    for query in (wanted, step.query.half()):
        assert choose_by_codes(query, step.codes, query[..., 0].detach(), 5).shape == (3, 5)
