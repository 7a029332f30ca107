"""Several sequences' attention by kernels that read shared rows in place: against plain torch, and its definition."""

from dataclasses import replace

import pytest
import torch
from support.eight_bits import eight_bits, scales_on
from support.kernel_runs import DEVICE, compiled_or_interpreted
from support.pairs import every_pair
from support.reference import assert_close
from support.shared_step import M, some_case

from sparsekv.kernels.attention import flash_attention
from sparsekv.kernels.attention import shared_decode_triton as module

pytestmark = compiled_or_interpreted
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@every_pair(
    {
        "dtype, tolerance": TOLERANCES.items(),
        "D": [64, 96, 128, 256],
        "Hk, G, B": [(1, 1, 1), (2, 3, 5), (2, 8, 2), (1, 7, 11)],
    }
)
def test_attention_by_its_definition(dtype: torch.dtype, tolerance: float, D: int, Hk: int, G: int, B: int) -> None:
    case = some_case(dtype=dtype, Hk=Hk, G=G, B=B, D=D, used=(25, 0, M))
    output, truth = case.by_kernels(), case.by_definition()
    assert (output.dtype, output.shape) == (dtype, truth.shape)
    assert_close(output, truth, tolerance)
    assert_close(case.by_torch(), truth, tolerance)


@pytest.mark.thinned
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("stands", [False, True], ids=["dropped", "centroids"])
def test_soft_caps_sinks_and_centroids(softcap: float | None, *, sinks: bool, stands: bool) -> None:
    case = some_case(softcap=softcap, sinks=sinks, stands=stands, used=(25, 0))
    assert_close(case.by_kernels(), case.by_definition(), 1e-5)
    assert_close(case.by_torch(), case.by_definition(), 1e-5)


@every_pair(
    {
        "dtype, tolerance": TOLERANCES.items(),
        "D": [64, 96, 128, 256],
        "Hk, G, B": [(1, 1, 1), (2, 3, 5), (2, 8, 2)],
        "softcap": [None, 3.0],
    }
)
def test_rows_in_8_bits(
    softcap: float | None, dtype: torch.dtype, tolerance: float, D: int, Hk: int, G: int, B: int
) -> None:
    case, rows = some_case(dtype=dtype, Hk=Hk, G=G, B=B, D=D, used=(25, 0, M), softcap=softcap), eight_bits(D, Hk, M, D)
    meant = replace(case.runs, keys=rows.exact_keys.to(DEVICE), values=rows.exact_values.to(DEVICE))
    stored = replace(
        case.runs, keys=rows.keys.to(DEVICE), values=rows.values.to(DEVICE), scales=scales_on(rows.scales, DEVICE)
    )
    truth, case = replace(case, runs=meant).by_definition(), replace(case, runs=stored)
    assert_close(case.by_kernels(), truth, tolerance)
    assert_close(case.by_torch(), truth, tolerance)


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice")  # of an infinite one
@pytest.mark.parametrize("loud", [1e8, torch.inf])
def test_one_tokens_query_takes_nothing_from_anothers_over_rows_in_8_bits(loud: float) -> None:
    case, rows = some_case(dtype=torch.bfloat16, used=(25, 0, M)), eight_bits(5, 2, M, 64)
    scales = scales_on(rows.scales, DEVICE)
    runs = replace(case.runs, keys=rows.keys.to(DEVICE), values=rows.values.to(DEVICE), scales=scales)
    among_loud = case.query.clone()
    among_loud[:, :, 1] *= loud
    quiet, found = (replace(case, runs=runs, query=query).by_kernels() for query in (case.query, among_loud))
    others = [0, 2, 3, 4]
    assert torch.equal(found[:, :, others], quiet[:, :, others])


def test_queries_that_do_not_fit_a_program_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    case = some_case(G=5, B=23)
    monkeypatch.setattr(module, "MOST_ROWS", 16)
    assert_close(case.by_kernels(), case.by_definition(), 1e-5)


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_with_nothing_shared_each_attends_to_its_own(*, sinks: bool) -> None:
    case = some_case(used=(0,), exact=0, stands=False, sinks=sinks)
    assert_close(case.by_kernels(), case.by_definition(), 1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("stands", [False, True], ids=["dropped", "centroids"])
def test_exact_rows_of_another_kernel_are_merged(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch, *, sinks: bool, stands: bool
) -> None:
    monkeypatch.setattr(flash_attention, "takes_rows", lambda *_: True)
    monkeypatch.setattr(flash_attention, "partial_attention", flash_attention.partial_attention.reference)
    case = some_case(G=5, B=23, used=(25, 0, M), softcap=softcap, sinks=sinks, stands=stands)
    assert_close(case.by_kernels(), case.by_definition(), 1e-5)


def test_another_kernel_may_have_all_shared_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "takes_rows", lambda *_: True)
    monkeypatch.setattr(flash_attention, "partial_attention", flash_attention.partial_attention.reference)
    case = some_case(used=(0,), exact=40, stands=False)
    assert_close(case.by_kernels(), case.by_definition(), 1e-5)
