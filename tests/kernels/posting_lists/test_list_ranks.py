"""Ranking keys by the codes of lists: against the definition in float64, plain torch, and the lists themselves."""

from dataclasses import fields, replace

import pytest
import torch
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory
from support.random_tensors import normal
from support.ranks import assert_ranks, least_kept, on_cpu
from support.reference import assert_close
from support.small_tables import SMALL, layer_input, tabled_layer

from sparsekv.kernels.posting_lists.list_ranks import (
    BINS,
    FRACTION_BITS,
    RANKS,
    ExactKeys,
    TokenRanks,
    laid_out,
    list_logits,
    lowest_rank,
    rank_tokens,
    top_ranked,
)
from sparsekv.kernels.posting_lists.list_ranks_triton import rank_tokens_triton
from sparsekv.kernels.posting_lists.posting_lists import (
    SCORINGS,
    ListCodes,
    encode_lists,
    estimate_logits,
    look_up,
    unpacked,
)

pytestmark = compiled_or_interpreted
SCALE = 0.3


def small_lists(seed: int, m: int = 4, size: int = 4, keys: int = 4500, heads: int = 2) -> ListCodes:
    """Random lists, in which a code is 0 with probability 81/256."""
    generator = torch.Generator().manual_seed(seed)
    words = -(-keys // 4096) * 512
    codes = torch.randint(-(2**31), 2**31, (heads, m, 6, words), generator=generator).int()
    codes &= torch.randint(-(2**31), 2**31, codes.shape, generator=generator).int()
    centroids = torch.nn.functional.normalize(normal(seed, heads, m, 6, size), dim=-1)
    channels = torch.randperm(m * size, generator=generator).view(m, size).int()
    steps, origins = 0.3 * normal(seed + 1, heads, m, 6).abs(), normal(seed + 2, heads, m, 6)
    return ListCodes(codes, origins, steps, True, centroids, channels, torch.ones(heads, m), keys)


def rank(
    query: torch.Tensor, lists: ListCodes, exact: ExactKeys, wanted: int, softcap: float | None = None
) -> TokenRanks:
    """Ranks from the kernels, back on the CPU."""
    moved = {field.name: getattr(lists, field.name) for field in fields(lists)}
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in moved.items()}
    beside = [None if one is None else one.to(DEVICE) for one in (exact.count, exact.sinks)]
    near = ExactKeys(exact.keys.to(DEVICE), *beside)
    with poisoned_memory():
        return on_cpu(rank_tokens_triton(query.to(DEVICE), ListCodes(**moved), near, wanted, SCALE, softcap))


@pytest.mark.parametrize("louder", [0.01, 1.0, 10.0, 100.0])
def test_the_best_keys_are_chosen_however_large_logits_are(louder: float) -> None:
    lists, query = small_lists(0), louder * normal(3, 2, 3, 16)
    found = rank(query, lists, ExactKeys(torch.zeros(2, 0, 16), sinks=torch.full((2, 3), -1e4)), 200)
    assert least_kept(top_ranked.reference(found, 200), by_definition(query, lists)) > 0.97


def assert_same(found: TokenRanks, expected: TokenRanks) -> None:
    """Equal to within the precision of bytes with three fraction bits, which is half that of ranks."""
    assert_ranks(found, expected, most=2, usual=0.6)


def by_definition(query: torch.Tensor, lists: ListCodes) -> torch.Tensor:
    """Logits [H, G, keys] float64."""
    H, G, _ = query.shape
    logits = torch.zeros(H, G, lists.keys, dtype=torch.float64)
    codes = unpacked(lists.codes)[..., : lists.keys].double()
    for head in range(H):
        for part, channels in enumerate(lists.channels.long()):
            products = lists.centroids[head, part].double() @ query[head][:, channels].double().T
            for g, (reach, nearest) in enumerate(zip(*products.max(0), strict=True)):
                weight = lists.weights[head, part].double() * (reach.clamp(min=0) if lists.reaching else 1)
                step, origin = lists.steps[head, part, nearest].double(), lists.origins[head, part, nearest].double()
                logits[head, g] += weight * (origin + step * codes[head, part, nearest])
    return SCALE * logits


@pytest.mark.parametrize("weights", ["one", "below zero too", "none"])
def test_logits_and_ranks_are_those_of_the_definition(weights: str) -> None:
    lists = small_lists(0)
    if weights != "one":
        lists = replace(lists, weights=normal(9, 2, 4) if weights == "below zero too" else torch.zeros(2, 4))
    query, keys, wanted = 2 * normal(3, 2, 3, 16), normal(4, 2, 70, 16), 200
    exact = by_definition(query, lists)
    error = (list_logits(query, lists, SCALE)[..., : lists.keys].double() - exact).abs().max()
    assert float(error) <= 4e-3 * float(exact.max() - exact.min())
    beside = (SCALE * query.double() @ keys.double().transpose(1, 2)).logsumexp(-1)
    total = torch.logaddexp(exact.logsumexp(-1), beside)
    found = rank(query, lists, ExactKeys(keys), wanted)
    assert_close(found.logsumexp, total, 1e-3)
    scores = (exact - total[..., None]).exp().mean(1).float()
    expected = ((scores.view(torch.int32) >> (23 - FRACTION_BITS)) - lowest_rank(wanted)).clamp(0, RANKS - 1)
    assert int((found.in_order() - expected).abs().max()) <= 2


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("G", "m", "size"), [(1, 4, 32), (4, 8, 8), (3, 6, 16)])
def test_the_same_as_in_plain_torch(G: int, m: int, size: int, dtype: torch.dtype) -> None:
    lists, D = small_lists(G, m, size, keys=3000), m * size
    query, keys = normal(1, 2, G, D).to(dtype), normal(2, 2, 90, D).to(dtype)
    arguments = query, lists, ExactKeys(keys), 150
    assert_same(rank(*arguments), rank_tokens.reference(*arguments, SCALE))


@pytest.mark.parametrize("keys", [1, 4095, 4096, 4097])
def test_any_number_of_keys(keys: int) -> None:
    arguments = 3 * normal(1, 2, 2, 16), small_lists(3, keys=keys), ExactKeys(normal(2, 2, 5, 16)), max(1, keys // 20)
    assert_same(rank(*arguments), rank_tokens.reference(*arguments, SCALE))


def test_a_soft_cap_and_scores_that_do_not_reach() -> None:
    lists = replace(small_lists(5), reaching=False)
    arguments = 3 * normal(1, 2, 2, 16), lists, ExactKeys(normal(2, 2, 40, 16)), 100
    assert_same(rank(*arguments, softcap=2.0), rank_tokens.reference(*arguments, SCALE, 2.0))


@pytest.mark.thinned
@pytest.mark.parametrize("louder", [-4.0, 0.0, 9.0])
@pytest.mark.parametrize("there", [0, 40])
def test_learned_sinks_take_part(there: int, louder: float) -> None:
    """Also where no exact key is."""
    lists, query, keys = small_lists(6), normal(1, 2, 3, 16), normal(2, 2, 40, 16)
    exact = ExactKeys(keys, torch.tensor([there], dtype=torch.int32), louder + normal(7, 2, 3))
    expected = rank_tokens.reference(query, lists, exact, 100, SCALE)
    assert exact.sinks is not None
    of_rows = [by_definition(query, lists), SCALE * query.double() @ keys[:, :there].double().transpose(1, 2)]
    total = torch.cat([*of_rows, exact.sinks[..., None].double()], -1).logsumexp(-1)
    assert_close(expected.logsumexp, total, 1e-3)
    assert_same(rank(query, lists, exact, 100), expected)


@pytest.mark.parametrize("there", [0, 1, 40])
def test_as_many_exact_keys_as_are_counted(there: int) -> None:
    """Keys past the count may hold anything."""
    lists, query, keys = small_lists(6), normal(1, 2, 2, 16), normal(2, 2, 40, 16)
    expected = rank_tokens.reference(query, lists, ExactKeys(keys[:, :there]), 100, SCALE)
    keys[:, there:] = torch.nan
    assert_same(rank(query, lists, ExactKeys(keys, torch.tensor([there], dtype=torch.int32)), 100), expected)


def test_several_tiles_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last program has fewer tiles, and the last tile fewer keys."""
    monkeypatch.setattr("sparsekv.kernels.posting_lists.list_ranks_triton.MANY", 1)
    arguments = normal(1, 2, 2, 16), small_lists(7, keys=9000), ExactKeys(normal(2, 2, 40, 16)), 100
    assert_same(rank(*arguments), rank_tokens.reference(*arguments, SCALE))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_four_bits_are_near_the_lists(scoring: str) -> None:
    tables = tabled_layer(1, SMALL, layer_input(1, middle=3000)).tables
    query, weights = normal(5, 2, 2, 16), normal(6, 2, 4).abs()
    exact = estimate_logits(tables, look_up(tables, query, weights=weights), scoring)
    found = list_logits(query, encode_lists(tables, scoring, weights), 1.0)[..., :3000]
    assert bool(((found - exact).std(-1) < 0.08 * exact.std(-1)).all())


def test_counts_cover_every_tile() -> None:
    found = rank_tokens.reference(normal(1, 2, 2, 16), small_lists(8), ExactKeys(normal(2, 2, 9, 16)), 50, SCALE)
    assert found.coarse.shape == (2, 2, BINS)
    assert bool((found.coarse.sum(-1) == 4096).all())


def test_where_a_rank_is() -> None:
    """The rank of key 8 j + 2 i + h of each 32 is in byte j of word i of row h."""
    ranks = torch.randint(0, RANKS, (2, 5000), generator=torch.Generator().manual_seed(1)).int()
    found = laid_out(ranks, torch.zeros(2, 1))
    assert torch.equal(found.in_order(), ranks)
    for key in (0, 1, 2, 8, 31, 33, 4095, 4096, 4999):
        tile, quad, j, i, h = key // 4096, key % 4096 // 32, key % 32 // 8, key % 8 // 2, key % 2
        assert torch.equal((found.ranks[:, tile, h, 4 * quad + i] >> (8 * j)) & 255, ranks[:, key])
