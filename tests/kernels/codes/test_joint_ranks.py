"""Ranking keys by product codes for several queries together: against the definition in float64, and plain torch."""

from dataclasses import replace

import pytest
import torch
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory
from support.random_tensors import normal
from support.ranks import assert_ranks, least_kept, on_cpu

from sparsekv.kernels.codes.code_ranks import HEADROOM, KeyCodes, as_stored, rank_jointly
from sparsekv.kernels.codes.joint_ranks_triton import rank_jointly_triton
from sparsekv.kernels.posting_lists.list_ranks import FRACTION_BITS, RANKS, TokenRanks, lowest_rank, top_ranked

pytestmark = compiled_or_interpreted
SCALE = 0.3


def small_codes(seed: int, m: int = 4, size: int = 4, keys: int = 4500) -> tuple[KeyCodes, torch.Tensor]:
    """Random codes, and what they stand for: keys [2, M, D] float64."""
    codes = torch.randint(0, 256, (2, keys, m), generator=torch.Generator().manual_seed(seed))
    D = m * size
    turn, books = normal(seed, 2, D, D).half() / D**0.5, normal(seed + 1, 2, m, 256, size).half()
    named = books.double()[torch.arange(2)[:, None, None], torch.arange(m), codes].flatten(2)
    words = as_stored(codes.byte())
    if seed % 2:  # in another order in memory, and with room
        words = torch.nn.functional.pad(words, (0, 77), value=-1).contiguous()
    return KeyCodes(turn, books, words, keys), named @ turn.double().transpose(1, 2)


def rank(
    query: torch.Tensor, totals: torch.Tensor, codes: KeyCodes, wanted: int, softcap: float | None = None
) -> TokenRanks:
    """Ranks from the kernels, back on the CPU."""
    there = replace(codes, turn=codes.turn.to(DEVICE), books=codes.books.to(DEVICE), words=codes.words.to(DEVICE))
    with poisoned_memory():
        found = rank_jointly_triton(query.to(DEVICE), totals.to(DEVICE), there, wanted, SCALE, softcap)
    return on_cpu(found)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_ranks_are_those_of_the_definition(softcap: float | None) -> None:
    (codes, stood_for), wanted = small_codes(0), 200
    query, totals = 2 * normal(3, 2, 15, 16), 8 + normal(4, 2, 15)
    logits = SCALE * query.double() @ stood_for.transpose(1, 2)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    scores = (logits - totals.double()[..., None]).exp().mean(1).float()
    expected = (scores.view(torch.int32) >> (23 - FRACTION_BITS)) - lowest_rank(wanted >> HEADROOM)
    expected = expected.clamp(0, RANKS - 1)
    found = rank(query, totals, codes, wanted, softcap)
    assert int((found.in_order() - expected).abs().max()) <= 1
    assert float((found.in_order() != expected).float().mean()) < 0.02
    assert int(expected.max()) > int(expected.min())
    assert torch.equal(found.logsumexp, totals)


@pytest.mark.parametrize("louder", [0.01, 1.0, 10.0, 100.0])
def test_the_best_keys_are_chosen_however_large_logits_are(louder: float) -> None:
    codes, stood_for = small_codes(0)
    query = louder * normal(3, 2, 15, 16)
    logits = SCALE * query.double() @ stood_for.transpose(1, 2)
    found = rank(query, logits.logsumexp(-1).float(), codes, 200)
    assert least_kept(top_ranked.reference(found, 200), logits) > 0.97


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "m", "size"), [(1, 8, 8), (12, 8, 16), (65, 4, 16), (51, 16, 8), (64, 16, 16), (130, 8, 32)]
)
def test_the_same_as_in_plain_torch(rows: int, m: int, size: int, dtype: torch.dtype) -> None:
    codes, _ = small_codes(rows, m, size, keys=300)
    query, totals = normal(1, 2, rows, m * size).to(dtype), 9 + normal(2, 2, rows)
    expected = rank_jointly.reference(query, totals, codes, 20, SCALE)
    assert_ranks(rank(query, totals, codes, 20), expected, most=1, usual=0.05)


@pytest.mark.parametrize("keys", [1, 256, 4095, 4096, 4097])
def test_any_number_of_keys(keys: int) -> None:
    codes, _ = small_codes(3, keys=keys)
    query, totals = 3 * normal(1, 2, 6, 16), 9 + normal(2, 2, 6)
    expected = rank_jointly.reference(query, totals, codes, max(1, keys // 20), SCALE)
    assert_ranks(rank(query, totals, codes, max(1, keys // 20)), expected, most=1, usual=0.05)


def test_a_query_of_zeros_and_one_of_huge_numbers() -> None:
    codes, _ = small_codes(5, keys=300)
    query, totals = normal(1, 2, 6, 16), 9 + normal(2, 2, 6)
    query[:, 0], query[:, 1] = 0, 100 * query[:, 1]
    expected = rank_jointly.reference(query, totals, codes, 20, SCALE, 30.0)
    assert_ranks(rank(query, totals, codes, 20, 30.0), expected, most=1, usual=0.05)
