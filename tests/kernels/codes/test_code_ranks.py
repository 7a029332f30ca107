"""Ranking keys by product codes: against the definition in float64, and plain torch."""

import math
from dataclasses import replace

import pytest
import torch
from support.coded_keys import moved, small_clusters, small_codes
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory
from support.random_tensors import normal
from support.ranks import assert_ranks, least_kept, on_cpu
from support.reference import assert_close

from sparsekv.kernels.codes.code_ranks import (
    HEADROOM,
    CodeRanks,
    LaidOutCodes,
    WeighedClusters,
    code_logits,
    octaves_of_steps,
    rank_codes,
    spans_of,
)
from sparsekv.kernels.codes.code_ranks_triton import rank_codes_triton
from sparsekv.kernels.posting_lists.list_ranks import (
    FEW_RANKS,
    FINE,
    FINE_FROM,
    FRACTION_BITS,
    RANKS,
    ExactKeys,
    TokenRanks,
    fewer_ranks,
    lowest_rank,
    top_ranked,
)

pytestmark = compiled_or_interpreted
SCALE = 0.3


def rank(
    query: torch.Tensor,
    codes: LaidOutCodes,
    clusters: WeighedClusters,
    exact: ExactKeys,
    wanted: int,
    softcap: float | None = None,
) -> CodeRanks:
    """Ranks from the kernels, back on the CPU."""
    there = query.to(DEVICE), moved(codes), moved(clusters), moved(exact)
    with poisoned_memory():
        found = rank_codes_triton(*there, wanted, SCALE, softcap)
    return CodeRanks(on_cpu(found.ranks), found.logits.cpu(), found.taken.cpu())


def assert_near(found: torch.Tensor, expected: torch.Tensor, precision: float = 1e-5) -> None:
    """Minus infinity at the same places, and all else close."""
    there = expected > -torch.inf
    assert torch.equal(there, found > -torch.inf)
    assert_close(found[there], expected[there].double(), precision)


def assert_same_ranks(found: TokenRanks, expected: TokenRanks) -> None:
    """A product that is rounded the other way moves a logit by a tenth of an octave, which has 8 ranks at most."""
    assert_ranks(found, expected, most=2, usual=0.01)


def assert_same(found: CodeRanks, expected: CodeRanks, precision: float = 1e-5) -> None:
    assert_same_ranks(found.ranks, expected.ranks)
    assert_near(found.logits, expected.logits, precision)
    assert not bool(found.taken.any())


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_ranks_are_those_of_the_definition(softcap: float | None) -> None:
    (codes, stood_for), wanted = small_codes(0), 200
    query, clusters, keys = 2 * normal(3, 2, 3, 16), small_clusters(5, 4500, 16), normal(4, 2, 70, 16)

    def logits_of(rows: torch.Tensor) -> torch.Tensor:
        logits = SCALE * query.double() @ rows.double().transpose(1, 2)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    logits = logits_of(stood_for)
    approximate = code_logits(query, codes, SCALE, softcap)
    steps = octaves_of_steps(query, codes, SCALE)
    rounding = codes.books.shape[1] / 2 * float(steps.max()) * math.log(2)
    assert float((approximate.double() - logits).abs().max()) <= rounding + 1e-4
    weights = clusters.counts.double().log() + clusters.bias.double()
    masses = (logits_of(clusters.keys) + weights[:, None]).logsumexp(-1)
    total = torch.logaddexp(masses, logits_of(keys).logsumexp(-1))
    found = rank(query, codes, clusters, ExactKeys(keys), wanted, softcap)
    assert_close(found.ranks.logsumexp, total, 1e-5)
    scores = (logits - total[..., None]).exp().mean(1).float()
    ranks = ((scores.view(torch.int32) >> (23 - FRACTION_BITS)) - lowest_rank(wanted >> HEADROOM)).clamp(0, RANKS - 1)
    expected = fewer_ranks(ranks)
    most = math.ceil(rounding / math.log(2) * 2**FRACTION_BITS / 2) + 1
    assert int((found.ranks.in_order() - expected).abs().max()) <= most


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("louder", [0.01, 1.0, 10.0, 100.0])
def test_the_best_keys_are_chosen_however_large_logits_are(louder: float, biased: bool) -> None:
    """Also where a bias of keys makes products with all centroids of some parts large, as in Qwen2's first layers."""
    codes, _ = small_codes(0)
    if biased:
        signs = normal(9, 2, 4, 256, 1).sign() * torch.tensor([1.0, 0.0, 0.0, 1.0])[:, None, None]
        books = (codes.books.float() + 6 * signs).half()
        codes = replace(codes, books=books, spans=spans_of(books))
    names = codes.unpacked()
    stood_for = codes.books.double()[torch.arange(2)[:, None, None], torch.arange(4), names].flatten(2)
    query = louder * normal(3, 2, 3, 16)
    logits = SCALE * (query.double() @ codes.turn.double()) @ stood_for.transpose(1, 2)
    # The clusters' total is right, so that only the ranks are at fault if worse keys are chosen.
    total = logits.logsumexp(-1)
    clusters = WeighedClusters(torch.zeros(2, 1, 16), torch.zeros(2, 1).int(), torch.zeros(2, 1))
    found = rank(query, codes, clusters, ExactKeys(torch.zeros(2, 0, 16), sinks=total.float()), 200)
    assert least_kept(top_ranked.reference(found.ranks, 200), logits) > 0.97


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("G", "m", "size"), [(1, 8, 8), (4, 8, 16), (3, 12, 8), (8, 16, 16), (5, 4, 16)])
def test_the_same_as_in_plain_torch(G: int, m: int, size: int, dtype: torch.dtype) -> None:
    D = m * size
    (codes, _), clusters = small_codes(G, m, size, keys=3000), small_clusters(7, 3000, D)
    query, keys = normal(1, 2, G, D).to(dtype), normal(2, 2, 90, D).to(dtype)
    clusters = replace(clusters, keys=clusters.keys.to(dtype))
    arguments = query, codes, clusters, ExactKeys(keys), 150
    assert_same(rank(*arguments), rank_codes.reference(*arguments, SCALE))


@pytest.mark.thinned
@pytest.mark.parametrize(("G", "m", "size", "T"), [(4, 8, 16, 3), (3, 12, 8, 1), (8, 4, 16, 2)])
@pytest.mark.parametrize("there", [0, 70])
def test_several_queries_of_a_head_are_ranked_as_if_each_had_its_own(
    G: int, m: int, size: int, T: int, there: int
) -> None:
    D = m * size
    (codes, _), clusters = small_codes(G, m, size, keys=5000), small_clusters(7, 5000, D)
    query, keys, sinks = normal(1, 2 * T, G, D), normal(2, 2, there, D), normal(3, 2 * T, G)
    apart = codes.repeated(T), clusters.repeated(T), ExactKeys(keys, sinks=sinks).repeated(T)
    expected = rank(query, *apart, 150)
    found = rank(query, codes, clusters, ExactKeys(keys, sinks=sinks), 150)
    for field in ("ranks", "coarse", "logsumexp"):
        assert torch.equal(getattr(found.ranks, field), getattr(expected.ranks, field))
    assert torch.equal(found.logits, expected.logits)
    assert found.taken.shape == (2 * T, 70)
    assert_same(found, rank_codes.reference(query, codes, clusters, ExactKeys(keys, sinks=sinks), 150, SCALE))


@pytest.mark.thinned
@pytest.mark.parametrize("form", ["FEW", "MANY", "MOST"])
@pytest.mark.parametrize(("G", "m", "softcap"), [(4, 8, None), (5, 16, 2.0), (1, 4, None)])
def test_the_same_however_many_tiles_there_are(
    form: str, G: int, m: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs take one piece of a tile, or several, and let the next kernel come early or late."""
    few, many = {"FEW": (1e9, 1e9), "MANY": (0, 1e9), "MOST": (0, 0)}[form]
    monkeypatch.setattr("sparsekv.kernels.codes.code_ranks_triton.MANY_TILES", few)
    monkeypatch.setattr("sparsekv.kernels.codes.code_ranks_triton.MOST_TILES", many)
    (codes, _), clusters = small_codes(2, m, 8, keys=5000), small_clusters(3, 5000, 8 * m)
    arguments = 2 * normal(1, 2, G, 8 * m), codes, clusters, ExactKeys(normal(2, 2, 9, 8 * m)), 150
    assert_same(rank(*arguments, softcap), rank_codes.reference(*arguments, SCALE, softcap))


def test_fewer_ranks_are_half_an_octave_or_an_eighth() -> None:
    """The full scale has 16 ranks an octave. Fewer ranks keep their order."""
    fewer = fewer_ranks(torch.arange(RANKS))
    widths = torch.bincount(fewer, minlength=FEW_RANKS)
    assert torch.equal(fewer, fewer.sort().values)
    assert fewer[[0, -1]].tolist() == [0, FEW_RANKS - 1]
    assert 1 <= int(widths.min()) <= int(widths.max()) <= 8
    assert int(widths[fewer[FINE_FROM + 2] : fewer[FINE_FROM + FINE - 2]].max()) == 2


@pytest.mark.parametrize("keys", [256, 4095, 4096, 4097])
def test_any_number_of_keys(keys: int) -> None:
    (codes, _), clusters = small_codes(3, keys=keys), small_clusters(4, keys, 16, clusters=keys // 64)
    arguments = 3 * normal(1, 2, 2, 16), codes, clusters, ExactKeys(normal(2, 2, 5, 16)), max(1, keys // 20)
    assert_same(rank(*arguments), rank_codes.reference(*arguments, SCALE))


@pytest.mark.thinned
@pytest.mark.parametrize("louder", [-4.0, 0.0, 9.0])
@pytest.mark.parametrize("there", [0, 40])
def test_learned_sinks_take_part(there: int, louder: float) -> None:
    """Also where no exact key is."""
    (codes, _), clusters = small_codes(6), small_clusters(4, 4500, 16)
    query, keys, sinks = normal(1, 2, 3, 16), normal(2, 2, 40, 16), louder + normal(7, 2, 3)
    exact = ExactKeys(keys, torch.tensor([there], dtype=torch.int32), sinks)
    expected = rank_codes.reference(query, codes, clusters, exact, 100, SCALE)
    masses = clusters.counts.double().log() + clusters.bias.double()
    of_clusters = SCALE * query.double() @ clusters.keys.double().transpose(1, 2) + masses[:, None]
    of_keys = SCALE * query.double() @ keys[:, :there].double().transpose(1, 2)
    total = torch.cat([of_clusters, of_keys, sinks[..., None].double()], -1).logsumexp(-1)
    assert_close(expected.ranks.logsumexp, total, 1e-5)
    assert_same(rank(query, codes, clusters, exact, 100), expected)


@pytest.mark.parametrize("there", [0, 1, 40])
def test_as_many_exact_keys_as_are_counted(there: int) -> None:
    """Keys past the count may hold anything."""
    (codes, _), clusters = small_codes(6), small_clusters(4, 4500, 16)
    query, keys = normal(1, 2, 2, 16), normal(2, 2, 40, 16)
    expected = rank_codes.reference(query, codes, clusters, ExactKeys(keys[:, :there]), 100, SCALE)
    keys[:, there:] = torch.nan
    exact = ExactKeys(keys, torch.tensor([there], dtype=torch.int32))
    assert_same(rank(query, codes, clusters, exact, 100), expected)


def test_products_far_below_the_best_do_not_carry() -> None:
    """Into the sums of the next head, which alone decides here: the others attend to nothing but their exact key."""
    (codes, _), clusters = small_codes(8), small_clusters(4, 4500, 16)
    query = torch.stack([300 * normal(1, 2, 16), 3 * normal(2, 2, 16), -300 * normal(3, 2, 16)], 1)
    others, middle = query[:, [0, 2]], torch.nn.functional.normalize(query[:, 1:2], dim=-1)
    exact = ExactKeys(others - (others * middle).sum(-1, keepdim=True) * middle)
    arguments = query, codes, clusters, exact, 100
    found, expected = rank(*arguments), rank_codes.reference(*arguments, SCALE)
    assert len(expected.ranks.in_order().unique()) > 50
    assert_same_ranks(found.ranks, expected.ranks)
