"""Attention of one decode step over rows in 8 bits, against its definition over what they mean."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.attention_steps import TOLERANCES, Step, expected, some_step
from support.eight_bits import eight_bits, scales_on
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory
from support.pairs import every_pair
from support.reference import assert_close

from sparsekv.kernels.attention.decode_attention import decode_attention
from sparsekv.kernels.attention.decode_attention_triton import decode_attention_triton
from sparsekv.kernels.common.kernel_inputs import RunRows, TakenRows

pytestmark = compiled_or_interpreted
by_dtype = pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items(), ids=lambda value: str(value))


def in_8_bits(step: Step, seed: int) -> tuple[Step, Callable[[RunRows], RunRows]]:
    """A step whose middle's rows are what numbers in 8 bits mean, and what puts these into its runs."""
    rows = eight_bits(seed, *step.keys.shape)

    def put(runs: RunRows) -> RunRows:
        keys, values = rows.keys.to(DEVICE), rows.values.to(DEVICE)
        return replace(runs, keys=keys, values=values, scales=scales_on(rows.scales, DEVICE))

    return replace(step, keys=rows.exact_keys, values=rows.exact_values), put


@every_pair({"dtype, tolerance": TOLERANCES.items(), "D": [64, 96, 128, 256], "softcap": [None, 3.0]})
def test_rows_in_8_bits(softcap: float | None, D: int, dtype: torch.dtype, tolerance: float) -> None:
    step, put = in_8_bits(some_step(D, D=D, dtype=dtype), D)
    query, runs, exact, centroids = step.on(DEVICE).arguments(1)
    truth = expected(step, True, D**-0.5, softcap, None)
    with poisoned_memory():
        output = decode_attention_triton(query, put(runs), exact, centroids, D**-0.5, softcap)
    assert output.dtype == dtype
    assert_close(output.cpu(), truth, tolerance)
    plain = decode_attention.reference(query, put(runs), exact, centroids, D**-0.5, softcap)
    assert_close(plain.cpu(), truth, tolerance)


@every_pair(
    {
        "dtype, tolerance": TOLERANCES.items(),
        "D": [64, 96, 128, 256],
        "clusters, exact": [(40, 70), (40, 0), (130, 5), (1, 3)],
    }
)
def test_centroids_in_8_bits_beside_such_rows(
    clusters: int, exact: int, D: int, dtype: torch.dtype, tolerance: float
) -> None:
    step, put = in_8_bits(some_step(D, D=D, dtype=dtype, clusters=clusters, exact=exact), D)
    centroids = eight_bits(D + 1, *step.stand_values.shape)
    query, runs, always, (stand,) = step.on(DEVICE).arguments(1)
    stand = replace(stand, values=centroids.values.to(DEVICE), scales=scales_on(centroids.scales, DEVICE))
    truth = expected(replace(step, stand_values=centroids.exact_values), True, D**-0.5, None, None)
    with poisoned_memory():
        output = decode_attention_triton(query, put(runs), always, [stand], D**-0.5)
    assert output.dtype == dtype
    assert_close(output.cpu(), truth, tolerance)
    assert_close(decode_attention.reference(query, put(runs), always, [stand], D**-0.5).cpu(), truth, tolerance)


@pytest.mark.parametrize("scaled", [False, True])
def test_what_is_left_of_clusters_beside_such_rows(scaled: bool) -> None:
    step, put = in_8_bits(some_step(7), 7)
    centroids = eight_bits(8, *step.stand_values.shape)
    query, runs, always, (stand,) = step.on(DEVICE).arguments(1)
    if scaled:
        stand = replace(stand, values=centroids.values.to(DEVICE), scales=scales_on(centroids.scales, DEVICE))
        step = replace(step, stand_values=centroids.exact_values)
    counts = torch.randint(0, 9, step.stand_counts.shape, dtype=torch.int32)
    taken = (counts * torch.rand(counts.shape).round()).int()
    stand = replace(
        stand, log_counts=stand.log_counts.clamp(min=0), clusters=TakenRows(counts.to(DEVICE), taken.to(DEVICE))
    )
    weights = (counts - taken).double().log() + stand.log_counts.cpu()
    truth = expected(replace(step, stand_counts=weights), True, 0.125, None, None)
    with poisoned_memory():
        output = decode_attention_triton(query, put(runs), always, [stand], 0.125)
    assert_close(output.cpu(), truth, 1e-5)


@pytest.mark.parametrize("G", range(1, 9) if DEVICE.type == "cuda" else (1, 3, 5, 7))
def test_rows_in_8_bits_for_groups_of_any_size(G: int) -> None:
    step, put = in_8_bits(some_step(G, G=G, exact=0), G)
    query, runs, exact, _ = step.on(DEVICE).arguments(0)
    assert_close(
        decode_attention_triton(query, put(runs), exact, (), 0.125).cpu(),
        expected(step, False, 0.125, None, None),
        1e-5,
    )


@pytest.mark.thinned
@by_dtype
@pytest.mark.parametrize("used", [None, (600, 41), (0, 3)])
def test_single_rows_in_8_bits_and_a_queue(
    used: tuple[int, int] | None, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsekv.kernels.attention.decode_attention_triton.LEAST_TILES", 0)
    step, put = in_8_bits(some_step(5, clusters=200, dtype=dtype), 5)
    rows = torch.rand(2, step.keys.shape[1], generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :600]
    numbers = torch.tensor(used or (600, 600), dtype=torch.int32)
    single = replace(step, starts=rows, lengths=torch.ones_like(rows) * (torch.arange(600) < numbers[:, None]))
    moved, queue = step.on(DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    given_used = None if used is None else numbers.to(DEVICE)
    runs = put(RunRows(moved.keys, moved.values, rows.to(DEVICE), None, 600, given_used, queue))
    with poisoned_memory():
        output = decode_attention_triton(moved.query, runs, (moved.exact_keys, moved.exact_values), (), 0.125)
    assert_close(output.cpu(), expected(single, False, 0.125, None, None), tolerance)


@by_dtype
def test_an_outlier_that_is_not_attended_to_takes_nothing_from_rows_in_8_bits(
    dtype: torch.dtype, tolerance: float
) -> None:
    step = some_step(5, clusters=200, dtype=dtype)
    rows, M = eight_bits(5, *step.keys.shape), step.keys.shape[1]
    chosen = 1 + torch.rand(2, M - 1, generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :600]
    rows.scales.rows[:, 0, 1] *= 1e4
    scales = replace(rows.scales, units=rows.scales.rows[..., 1].float().mean(1))
    single = replace(
        step,
        keys=rows.exact_keys,
        values=rows.exact_values,
        starts=chosen,
        lengths=torch.ones_like(chosen),
        exact_keys=step.exact_keys[:, :0],
        exact_values=step.exact_values[:, :0],
    )
    runs = RunRows(rows.keys, rows.values, chosen, None, 600)
    runs = replace(runs, keys=rows.keys.to(DEVICE), values=rows.values.to(DEVICE), starts=chosen.to(DEVICE))
    exact = single.exact_keys.to(DEVICE), single.exact_values.to(DEVICE)
    output = decode_attention_triton(
        step.query.to(DEVICE), replace(runs, scales=scales_on(scales, DEVICE)), exact, (), 0.125
    )
    assert_close(output.cpu(), expected(single, False, 0.125, None, None), tolerance)
