"""Attention to contiguous rows by FlashAttention-3, against its definition in float64."""

import pytest
import torch
from support.random_tensors import normal
from support.reference import assert_close
from support.shared_step import Case, some_case

from sparsekv.kernels.attention.flash_attention import partial_attention, partial_attention_3, takes_rows

pytestmark = pytest.mark.hopper
TOLERANCE = 2e-2


def of_many(D: int, G: int, B: int, *, softcap: float | None) -> Case:
    """Queries of many tokens to many exact rows, beside all other kinds of rows."""
    return some_case(dtype=torch.bfloat16, Hk=2, G=G, B=B, D=D, used=(25, 0), exact=5003, softcap=softcap, sinks=True)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize(("G", "B"), [(1, 128), (4, 33), (7, 40), (8, 256)])
@pytest.mark.parametrize("D", [64, 128])
def test_many_queries_by_definition(D: int, G: int, B: int, softcap: float | None) -> None:
    case = of_many(D, G, B, softcap=softcap)
    assert takes_rows(case.query, case.exact[0], softcap)
    assert_close(case.by_kernels(), case.by_definition(), TOLERANCE)


@pytest.mark.parametrize("D", [64, 96, 128, 256])
def test_sizes_without_a_kernel_are_left_to_triton(D: int) -> None:
    case = of_many(D, 3, 50, softcap=None)
    assert_close(case.by_kernels(), case.by_definition(), TOLERANCE)


def test_the_plain_function_gives_the_same() -> None:
    query = normal(0, 2, 4, 20, 128).bfloat16().cuda()
    keys, values = (normal(seed, 2, 6000, 128).bfloat16().cuda() for seed in (1, 2))
    given = 2 * query, keys, values, 128**-0.5, None
    for found, truth in zip(partial_attention_3(*given), partial_attention.reference(*given), strict=True):
        assert_close(found.cpu(), truth.double().cpu(), TOLERANCE)


def test_float32_is_left_to_triton() -> None:
    case = some_case(Hk=2, G=3, B=50, exact=5003)
    assert not takes_rows(case.query, case.exact[0], None)
