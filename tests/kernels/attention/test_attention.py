"""Attention over segments against dense attention over their concatenation, in float64."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import assert_close, random_attention, reference_attention

from sparsekv.kernels.attention.attention import (
    Segment,
    attend,
    attend_once,
    attend_with_logsumexp,
    causal_attention,
    causal_mask,
)
from sparsekv.kernels.common.kernel_inputs import ScoredCentroids

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
by_dtype = pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items(), ids=lambda value: str(value))


def some_sinks(Hk: int = 2, G: int = 3) -> torch.Tensor:
    return torch.linspace(-2, 6, Hk * G).view(Hk, G)


def expected_mask(queries: int, keys: int, window: int | None) -> torch.Tensor:
    """Query i is at position keys - queries + i and sees itself and earlier keys, `window` in all."""
    rows = []
    for position in range(keys - queries, keys):
        first = 0 if window is None else position - window + 1
        rows.append([first <= key <= position for key in range(keys)])
    return torch.tensor(rows)


@by_dtype
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("sinks", [None, some_sinks()], ids=["no sinks", "sinks"])
def test_segments_share_one_softmax(
    D: int, dtype: torch.dtype, tolerance: float, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    query, keys, values = random_attention(T=60, D=D, dtype=dtype)
    segments = [Segment(keys[:, :37], values[:, :37]), Segment(keys[:, 37:], values[:, 37:])]
    output = attend(query, segments, D**-0.5, softcap, sinks)
    assert output.dtype == dtype
    expected = reference_attention(query, keys, values, D**-0.5, softcap=softcap, sink_logits=sinks)
    assert_close(output, expected, tolerance)


@by_dtype
@pytest.mark.parametrize(("T", "Hk", "G", "D"), [(1, 1, 1, 16), (60, 2, 3, 64), (257, 3, 5, 96)])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_one_query_attends_to_rows_and_centroids_at_once(
    T: int, Hk: int, G: int, D: int, dtype: torch.dtype, tolerance: float, softcap: float | None, sinks: bool
) -> None:
    query, keys, values = random_attention(Hk=Hk, G=G, Q=1, T=T + 9, D=D, dtype=dtype)
    logits = torch.einsum("hgd,htd->hgt", query[:, :, 0].double(), keys[:, T:].double()) * D**-0.5
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    # A centroid that represents n rows is attended like n copies of it, and not at all if n is 0.
    copies = torch.arange(9).roll(Hk).expand(Hk, -1)
    stand_in = ScoredCentroids(logits.float(), copies.float().log(), values[:, T:])
    again = torch.cat([torch.arange(T), T + torch.arange(9).repeat_interleave(copies[0])])
    sink_logits = some_sinks(Hk, G) if sinks else None
    rows = [(keys[:, : T // 2], values[:, : T // 2]), (keys[:, T // 2 : T], values[:, T // 2 : T])]
    output = attend_once(query[:, :, 0], rows, [stand_in], D**-0.5, softcap, sink_logits)
    assert output.dtype == dtype
    expected = reference_attention(
        query, keys[:, again], values[:, again], D**-0.5, softcap=softcap, sink_logits=sink_logits
    )
    assert_close(output, expected[:, :, 0], tolerance)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(0, 1000))
@settings(max_examples=40)
def test_any_cut_into_masked_segments_gives_the_same_output(lengths: list[int], seed: int) -> None:
    total = sum(lengths) + 1
    query, keys, values = random_attention(T=total, D=16, seed=seed)
    mask = torch.rand(2, 3, 4, total, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[..., -1] = True
    pieces = [tensor.split([*lengths, 1], -2) for tensor in (keys, values)]
    segments = [Segment(*piece) for piece in zip(*pieces, mask.split([*lengths, 1], -1), strict=True)]
    expected = reference_attention(query, keys, values, 0.25, mask=mask)
    assert_close(attend(query, segments, 0.25), expected, 2e-6)


@pytest.mark.parametrize("sinks", [None, torch.tensor([[0.5, -1.0, 3.0], [0.0, 2.0, 40.0]])], ids=["plain", "sinks"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_denominator_is_of_everything(softcap: float | None, sinks: torch.Tensor | None) -> None:
    query, keys, values = random_attention(T=60)
    nothing = torch.zeros(20, dtype=torch.bool)
    segments = [
        Segment(keys[:, :25], values[:, :25], bias=torch.linspace(0, 3, 25)),
        Segment(keys[:, 25:40], values[:, 25:40]),
        Segment(keys[:, 40:], values[:, 40:], nothing),
    ]
    output, total = attend_with_logsumexp(query, segments, 0.25, softcap, sinks)
    assert_close(output, attend(query, segments, 0.25, softcap, sinks), 1e-6)
    logits = 0.25 * torch.einsum("hgqd,htd->hgqt", query.double(), keys.double())
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    first, second = (logits[..., :25] + torch.linspace(0, 3, 25)).logsumexp(-1), logits[..., 25:40].logsumexp(-1)
    whole = torch.logaddexp(first, second)
    whole = whole if sinks is None else torch.logaddexp(whole, sinks[..., None].double())
    assert_close(total, whole, 1e-6)


@pytest.mark.parametrize("shape", [(2, 1, 1, 50), (1, 1, 4, 50), (2, 3, 1, 50), (50,)], ids=str)
def test_a_mask_broadcasts(shape: tuple[int, ...]) -> None:
    query, keys, values = random_attention()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    expected = reference_attention(query, keys, values, 0.125, mask=mask)
    assert_close(attend(query, [Segment(keys, values, mask)], 0.125), expected, 2e-6)


@by_dtype
def test_nothing_leaks_from_slots_that_are_masked_out(dtype: torch.dtype, tolerance: float) -> None:
    query, keys, values = random_attention(dtype=dtype)
    mask = torch.arange(50) < 40
    expected = reference_attention(query, keys[:, :40], values[:, :40], 0.125)
    values[:, 40:] = torch.finfo(dtype).max
    for poison in (torch.finfo(dtype).max, torch.inf, torch.nan):
        keys[:, 40:] = poison
        assert_close(attend(query, [Segment(keys, values, mask)], 0.125), expected, tolerance)


def test_masked_slots_weigh_nothing_however_low_the_other_logits_are() -> None:
    query, keys, values = random_attention()
    query, keys = torch.full_like(query, 100), torch.full_like(keys, -100)
    mask = torch.arange(50) < 40
    expected = values[:, None, None, :40].double().mean(3).expand_as(query)
    assert_close(attend(query, [Segment(keys, values, mask), Segment(-keys, values, ~mask[:1])], 1.0), expected, 2e-6)


@by_dtype
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("shape", [(2, 1, 4), (2, 1, 1), (2, 3, 4)], ids=str)
def test_a_row_with_the_logarithm_of_a_count_as_its_bias_weighs_as_so_many_rows(
    dtype: torch.dtype, tolerance: float, softcap: float | None, shape: tuple[int, ...]
) -> None:
    """Counts from 0, which removes the row, to more than bfloat16 represents exactly; biased rows are in float32."""
    query, keys, values = random_attention(T=30, dtype=dtype)
    counts = torch.randint(0, 400, (*shape, 20), generator=torch.Generator().manual_seed(2))
    biased = Segment(keys[:, :20].float(), values[:, :20].float(), bias=counts.float().log())
    output = attend(query, [biased, Segment(keys[:, 20:], values[:, 20:])], 0.125, softcap)
    weights = torch.cat([counts.expand(2, 3, 4, -1), torch.ones(2, 3, 4, 10, dtype=torch.int64)], -1)
    for head, part, row in itertools.product(*map(range, (2, 3, 4))):
        times = weights[head, part, row]
        rows = (tensor[None, head].repeat_interleave(times, 1) for tensor in (keys, values))
        one = reference_attention(query[None, head, None, part, None, row], *rows, 0.125, softcap=softcap)
        assert_close(output[head, part, row], one[0, 0, 0], 3 * tolerance)


def test_large_logits_do_not_overflow() -> None:
    query, keys, values = random_attention(dtype=torch.float16)
    query, keys = query * 50, keys * 50
    assert_close(attend(query, [Segment(keys, values)], 1.0), reference_attention(query, keys, values, 1.0), 2e-3)


@given(st.integers(1, 12), st.integers(0, 12), st.none() | st.integers(1, 30))
def test_causal_mask_sees_itself_and_what_is_before_within_the_window(
    queries: int, before: int, window: int | None
) -> None:
    mask = causal_mask(queries, before + queries, window, torch.device("cpu"))
    assert torch.equal(mask, expected_mask(queries, before + queries, window))


@pytest.mark.parametrize("window", [None, 1, 7, 1000])
@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("sinks", [None, some_sinks()], ids=["no sinks", "sinks"])
def test_causal_attention(window: int | None, queries: int, softcap: float | None, sinks: torch.Tensor | None) -> None:
    query, keys, values = random_attention(Q=queries, T=40)
    flat_sinks = None if sinks is None else sinks.flatten()
    output = causal_attention(query.flatten(0, 1), keys, values, 0.2, softcap, window, flat_sinks)
    mask = expected_mask(queries, 40, window)
    expected = reference_attention(query, keys, values, 0.2, mask=mask, softcap=softcap, sink_logits=sinks)
    assert_close(output, expected.flatten(0, 1), 2e-6)


@by_dtype
@pytest.mark.parametrize("G", [1, 2, 3, 8])
def test_causal_attention_of_every_group_size(G: int, dtype: torch.dtype, tolerance: float) -> None:
    query, keys, values = random_attention(G=G, Q=6, dtype=dtype)
    output = causal_attention(query.flatten(0, 1), keys, values, 0.125)
    expected = reference_attention(query, keys, values, 0.125, mask=expected_mask(6, 50, None))
    assert_close(output, expected.flatten(0, 1), tolerance)
