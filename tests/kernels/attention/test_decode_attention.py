"""Attention of one decode step by kernels: against its definition in float64, and against plain torch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_steps import TOLERANCES, Step, expected, some_step
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory, with_room
from support.pairs import every_pair
from support.random_tensors import normal
from support.reference import assert_close, relative_error

from sparsekv.kernels.attention.decode_attention import decode_attention
from sparsekv.kernels.attention.decode_attention_triton import decode_attention_triton
from sparsekv.kernels.common.kernel_inputs import RunRows, ScoredCentroids, TakenRows, one_level
from sparsekv.kernels.common.launch import num_splits

pytestmark = compiled_or_interpreted
by_dtype = pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items(), ids=lambda value: str(value))


def attended(
    step: Step, stands: int, scale: float, softcap: float | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Output of the kernels, back on the CPU."""
    moved, sinks = step.on(DEVICE), None if sinks is None else sinks.to(DEVICE)
    with poisoned_memory():
        return decode_attention_triton(*moved.arguments(stands), scale, softcap, sinks).cpu()


@every_pair({"dtype, tolerance": TOLERANCES.items(), "D": [64, 96, 128, 256], "stands": [0, 1, 2]})
def test_attention_by_its_definition(stands: int, D: int, dtype: torch.dtype, tolerance: float) -> None:
    step = some_step(D, D=D, dtype=dtype)
    output, truth = attended(step, stands, D**-0.5), expected(step, stands > 0, D**-0.5, None, None)
    assert output.dtype == dtype
    assert_close(output, truth, tolerance)


def test_values_with_other_strides_than_keys_are_refused() -> None:
    """The kernels would read other rows."""
    step = some_step().on(DEVICE)
    runs, exact, *rest = step.arguments(0)[1:]
    wider = torch.nn.functional.pad(runs.values, (0, 0, 0, 1))[:, :-1]
    with pytest.raises(AssertionError):
        decode_attention_triton(step.arguments(0)[0], replace(runs, values=wider), exact, *rest, 0.2)


@pytest.mark.parametrize("G", range(1, 9) if DEVICE.type == "cuda" else (2, 4, 6, 8))
def test_groups_of_any_size(G: int) -> None:
    step = some_step(G, G=G)
    assert_close(attended(step, 1, 0.125), expected(step, True, 0.125, None, None), 1e-5)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 5, 6).view(2, 3)], ids=["no sinks", "sinks"])
def test_soft_caps_and_sink_logits(softcap: float | None, sinks: torch.Tensor | None) -> None:
    step = some_step()
    assert_close(attended(step, 1, 0.2, softcap, sinks), expected(step, True, 0.2, softcap, sinks), 1e-5)


@pytest.mark.parametrize(
    ("clusters", "budget", "exact"),
    [(1, 1, 0), (1, 10**6, 0), (50, 0, 1), (50, 10**6, 0), (3, 2, 200), (400, 700, 5)],
    ids=["one row", "one run", "budget 0", "everything", "mostly exact", "many runs"],
)
def test_ends_of_the_range(clusters: int, budget: int, exact: int) -> None:
    step = some_step(3, clusters=clusters, budget=budget, exact=exact)
    stands = 0 if clusters == 1 or budget > 10**5 else 1
    assert_close(attended(step, stands, 0.125), expected(step, stands > 0, 0.125, None, None), 1e-5)


def test_many_runs() -> None:
    step = some_step(8, clusters=300, budget=900)
    assert_close(attended(step, 1, 0.125), expected(step, True, 0.125, None, None), 1e-5)


@pytest.mark.thinned
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("clusters", [1, 40, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_left_of_clusters_is_computed_where_it_is_attended(
    clusters: int, dtype: torch.dtype, ahead: bool
) -> None:
    """Some are empty, and of some all rows are taken; something is added to the logs of the others."""
    step = some_step(5, clusters=clusters, budget=60 * clusters, dtype=dtype)
    random = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 9, (2, clusters), dtype=torch.int32, generator=random)
    taken = (counts * torch.rand(2, clusters, generator=random).round()).int()
    bias = normal(3, 2, clusters)
    truth = expected(replace(step, stand_counts=(counts - taken).double().log() + bias), True, 0.125, None, None)
    query, runs, exact, (part,) = step.on(DEVICE).arguments(1)
    # As they lie beside one another in a table: heads are not contiguous.
    all_counts = torch.cat([counts, counts], 1).to(DEVICE)[:, :clusters]
    of_clusters = TakenRows(all_counts, taken.to(DEVICE))
    part = replace(part, log_counts=bias.to(DEVICE), clusters=of_clusters, ahead=ahead)
    with poisoned_memory():
        found = decode_attention_triton(query, runs, exact, [part], 0.125).cpu()
    for output in (found, decode_attention.reference(query, runs, exact, [part], 0.125).cpu()):
        assert_close(output, truth, TOLERANCES[dtype])


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(0, 200), st.integers(0, 90), st.integers(0, 2))
@settings(max_examples=15)
def test_any_runs(seed: int, clusters: int, budget: int, exact: int, stands: int) -> None:
    step = some_step(seed, H=1, G=2, D=16, clusters=clusters, budget=budget, exact=exact + 1)
    assert_close(attended(step, stands, 0.25), expected(step, stands > 0, 0.25, None, None), 1e-5)


@pytest.mark.parametrize("stands", [0, 1, 2])
def test_the_reference_by_the_definition(stands: int) -> None:
    step, sinks = some_step(), torch.linspace(-2, 5, 6).view(2, 3)
    output = decode_attention.reference(*step.arguments(stands), 0.2, 3.0, sinks)
    assert_close(output, expected(step, stands > 0, 0.2, 3.0, sinks), 1e-5)


@pytest.mark.parametrize("stands", [1, 2])
def test_rows_in_a_buffer_with_room(stands: int) -> None:
    """Exact rows of a cache have such a layout, and so do values of clusters to which tokens are appended."""
    step = some_step(exact=40)
    query, runs, exact, centroids = step.on(DEVICE).arguments(stands)
    keys, values = (with_room(rows) for rows in exact)
    roomy = [replace(part, values=with_room(part.values)) for part in centroids]
    output = decode_attention_triton(query, runs, (keys, values), roomy, 0.125)
    assert_close(output.cpu(), expected(step, True, 0.125, None, None), 1e-5)


@every_pair({"counted": [False, True], "D": [64, 128], "slots": [1, 16, 75]})
def test_centroids_that_are_listed(slots: int, D: int, counted: bool) -> None:
    """Listed centroids are indices into all clusters' values, beside plain ones; their number may be on the device."""
    step = some_step(slots, D=D)
    rows = torch.rand(2, 40, generator=torch.Generator().manual_seed(slots)).argsort(-1)
    rows = torch.cat([rows, rows], 1)[:, :slots]
    logits, counts = normal(7, 2, 3, slots), normal(8, 2, slots)
    query, runs, exact, plain = step.on(DEVICE).arguments(1)
    all_values = normal(6, 2, 40, D)
    used = torch.full((2,), slots, dtype=torch.int32)
    if counted:
        logits = torch.cat([logits, torch.full((2, 3, 40), -torch.inf)], -1)
        counts, rows = (torch.nn.functional.pad(one, (0, 40)) for one in (counts, rows))
    listed = ScoredCentroids(*(one.to(DEVICE) for one in (logits, counts, all_values, rows.int())))
    listed = replace(listed, used=used.to(DEVICE)) if counted else listed
    values = all_values.gather(1, rows[..., None].expand(-1, -1, D))
    together = replace(
        step,
        stand_logits=torch.cat([step.stand_logits, logits], -1),
        stand_counts=torch.cat([step.stand_counts, counts], -1),
        stand_values=torch.cat([step.stand_values, values], 1),
    )
    truth = expected(together, True, 0.125, None, None)
    for part in (listed, replace(listed, values=with_room(all_values))):
        with poisoned_memory():
            output = decode_attention_triton(query, runs, exact, [part, *plain], 0.125)
        assert_close(output.cpu(), truth, 1e-5)
    assert_close(decode_attention.reference(query, runs, exact, [*plain, listed], 0.125).cpu(), truth, 1e-5)


@pytest.mark.parametrize("used", [(40, 11), (0, 1)])
def test_listed_centroids_after_the_used_ones_are_not_attended(used: tuple[int, int]) -> None:
    """Slots after the used ones may hold anything: rows that no cluster has, logits that are nan."""
    step, slots = some_step(5), 40
    rows = torch.stack([torch.randperm(60, generator=torch.Generator().manual_seed(head)) for head in range(2)])[
        :, :slots
    ]
    logits, counts, all_values = normal(7, 2, 3, slots), normal(8, 2, slots), normal(6, 2, 60, step.keys.shape[2])
    there = torch.arange(slots) < torch.tensor(used)[:, None]
    known = replace(
        step,
        stand_logits=logits.masked_fill(~there[:, None], -torch.inf),
        stand_counts=counts,
        stand_values=all_values.gather(1, rows[..., None].expand(-1, -1, all_values.shape[2])),
    )
    listed = ScoredCentroids(
        logits.masked_fill(~there[:, None], torch.nan).to(DEVICE),
        counts.to(DEVICE),
        all_values.to(DEVICE),
        torch.where(there, rows, 10**8).int().to(DEVICE),
        torch.tensor(used, dtype=torch.int32, device=DEVICE),
    )
    query, runs, exact, _ = step.on(DEVICE).arguments(0)
    truth = expected(known, True, 0.125, None, None)
    with poisoned_memory():
        assert_close(decode_attention_triton(query, runs, exact, [listed], 0.125).cpu(), truth, 1e-5)
    assert_close(decode_attention.reference(query, runs, exact, [listed], 0.125).cpu(), truth, 1e-5)


def test_listed_centroids_cannot_be_concatenated_to_others() -> None:
    """Their rows would be lost."""
    part = ScoredCentroids(normal(1, 2, 3, 5), normal(2, 2, 5), normal(3, 2, 5, 8))
    with pytest.raises(AssertionError):
        one_level([part, replace(part, rows=torch.zeros(2, 5, dtype=torch.int32))])


@pytest.mark.parametrize(("exact", "used"), [(0, None), (70, None), (70, (20, 33)), (70, (0, 1))])
def test_runs_of_one_row(exact: int, used: tuple[int, int] | None) -> None:
    step = some_step(5, exact=exact)
    rows = torch.rand(2, step.keys.shape[1], generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :33]
    numbers = None if used is None else torch.tensor(used, dtype=torch.int32, device=DEVICE)
    there = torch.arange(33) < (33 if used is None else torch.tensor(used)[:, None])
    single = replace(step, starts=rows, lengths=torch.ones_like(rows) * there)
    moved = step.on(DEVICE)
    # Entries after the used ones are invalid row indices.
    runs = RunRows(moved.keys, moved.values, torch.where(there, rows, 10**8).to(DEVICE), None, 33, numbers)
    arguments = moved.query, runs, (moved.exact_keys, moved.exact_values), ()
    truth = expected(single, False, 0.125, None, None)
    with poisoned_memory():
        assert_close(decode_attention_triton(*arguments, 0.125).cpu(), truth, 1e-5)
    assert_close(decode_attention.reference(*arguments, 0.125).cpu(), truth, 1e-5)


@every_pair({"dtype, tolerance": TOLERANCES.items(), "percent": [25, 100], "used": [None, (600, 41), (0, 3)]})
def test_rows_that_go_to_the_program_that_is_done_first(
    used: tuple[int, int] | None, percent: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsekv.kernels.attention.decode_attention_triton.LEAST_TILES", 0)
    monkeypatch.setattr("sparsekv.kernels.attention.decode_attention_triton.QUEUED_PERCENT", percent)
    step = some_step(5, clusters=200, dtype=dtype)
    rows = torch.rand(2, step.keys.shape[1], generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :600]
    numbers = torch.tensor(used or (600, 600), dtype=torch.int32)
    single = replace(step, starts=rows, lengths=torch.ones_like(rows) * (torch.arange(600) < numbers[:, None]))
    moved, queue = step.on(DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    given_used = None if used is None else numbers.to(DEVICE)
    runs = RunRows(moved.keys, moved.values, rows.to(DEVICE), None, 600, given_used, queue)
    with poisoned_memory():
        output = decode_attention_triton(moved.query, runs, (moved.exact_keys, moved.exact_values), (), 0.125)
    assert_close(output.cpu(), expected(single, False, 0.125, None, None), tolerance)
    assert torch.equal(queue.cpu() > 0, numbers > 0)


@pytest.mark.parametrize("count", [0, 1, 63, 70])
def test_exact_rows_that_are_counted_on_the_device(count: int) -> None:
    step = some_step(4)
    shorter = replace(step, exact_keys=step.exact_keys[:, :count], exact_values=step.exact_values[:, :count])
    truth = expected(shorter, True, 0.125, None, None)
    for rows in (step.exact_keys, step.exact_values):
        rows[:, count:] = torch.nan
    arguments, number = step.on(DEVICE).arguments(1), torch.tensor([count], dtype=torch.int32, device=DEVICE)
    with poisoned_memory():
        assert_close(decode_attention_triton(*arguments, 0.125, exact_count=number).cpu(), truth, 1e-5)
    assert_close(decode_attention.reference(*arguments, 0.125, exact_count=number).cpu(), truth, 1e-5)


@given(st.integers(1, 3000), st.integers(1, 10**6), st.integers(1, 1000))
def test_the_last_wave_is_as_full_as_one_wave_could_be(heads: int, rows: int, at_once: int) -> None:
    def full(programs: int) -> float:
        return programs / (-(-programs // at_once) * at_once)

    number = num_splits(heads, rows, at_once)
    assert number >= 1
    assert full(heads * number) >= full(heads * max(1, at_once // heads)) - 0.05


def test_an_error_that_moves_would_be_a_race() -> None:
    step = some_step(11, clusters=200, budget=600)
    first = attended(step, 1, 0.125)
    assert all(relative_error(attended(step, 1, 0.125), first) == 0 for _ in range(3))
