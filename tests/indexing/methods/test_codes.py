"""Tests of the stored tensors of codes: codes keep what queries ask for, and clusters' masses omit the best tokens."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import clustered, normal
from support.reference import assert_close
from support.small_index import small_plan
from support.small_tables import layer_input

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.indexers.interface import LayerInput, choose_indexers
from sparsekv.indexing.indexers.product_codes import PRIOR, TAKEN, attended, key_turn, query_turn
from sparsekv.indexing.methods import codes
from sparsekv.indexing.methods.codes import FIT_EVERY, CodesIndexer
from sparsekv.indexing.methods.pqcache import PQCacheIndexer

properties = settings(max_examples=10)
SMALL = CodesIndexer(levels=(0.1,), code_bytes=4, iterations=3)


def _decoded(built: dict[str, torch.Tensor]) -> torch.Tensor:
    """[Hk, M, D] float64: the turned keys that the codes name."""
    codes, books = built["codes"].long(), built["codebooks"].double()
    parts = [
        books[:, part].gather(1, codes[..., part, None].expand(-1, -1, books.shape[3]))
        for part in range(books.shape[1])
    ]
    return torch.cat(parts, -1)


@properties
@given(seed=st.integers(0, 10**6), middle=st.integers(1, 300), parts=st.sampled_from([1, 4, 16]))
def test_products_stay_the_same_when_both_are_turned(seed: int, middle: int, parts: int) -> None:
    keys, queries = normal(seed, 2, middle, 16), normal(seed + 1, 2, 40, 16) * torch.linspace(0.1, 3, 16)
    turn = query_turn(keys, queries, parts, torch.rand(2, middle) + 0.1)
    products = (queries.double() @ turn.double()) @ (keys.double() @ key_turn(turn).double()).transpose(1, 2)
    assert_close(products, queries.double() @ keys.double().transpose(1, 2), 1e-5)


@properties
@given(seed=st.integers(0, 10**6), middle=st.integers(1, 300))
def test_a_code_names_the_nearest_centroid_of_each_part_of_a_turned_key(seed: int, middle: int) -> None:
    layer = layer_input(seed, middle=middle)
    built = SMALL.build_layer(layer)
    turned = (layer.keys @ key_turn(built["query_turn"])).double().unflatten(-1, (4, -1))
    for part, book in enumerate(built["codebooks"].double().unbind(1)):
        squares = torch.cdist(turned[:, :, part], book).square()
        named = squares.gather(-1, built["codes"][..., part, None].long())[..., 0]
        rounding = 1e-6 * turned[:, :, part].square().sum(-1)  # of products in float32, where centroids nearly agree
        assert bool((named <= squares.amin(-1) + 1e-3 * squares.amax(-1) + rounding).all())


def test_codes_lose_less_of_what_the_queries_ask_for() -> None:
    keys = 0.5 * clustered(0, 2, 2000, 16, 60) + normal(1, 2, 2000, 16)
    asked = normal(2, 4, 200, 3) @ normal(3, 3, 16) + 0.1 * normal(4, 4, 200, 16)  # in few directions
    layer = replace(layer_input(), keys=keys, values=keys, queries=asked[:, :100])
    turned, plain = SMALL.build_layer(layer), PQCacheIndexer(pq_bytes=4, iterations=3).build_layer(layer)
    held_out = asked[:, 100:].unflatten(0, (2, 2)).flatten(1, 2).double()
    exact = held_out @ keys.double().transpose(1, 2)
    lost = (held_out @ turned["query_turn"].double()) @ _decoded(turned).transpose(1, 2) - exact
    before = held_out @ _decoded(plain).transpose(1, 2) - exact
    assert float(lost.square().mean()) < 0.5 * float(before.square().mean())


def test_codes_lose_less_of_the_keys_that_the_queries_attend_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside codes for which all keys weigh the same."""
    keys, queries = clustered(0, 2, 3000, 16, 60), 2 * normal(1, 4, 400, 16)
    layer = replace(layer_input(), keys=keys, values=keys, queries=queries[:, :200])
    held_out = queries[:, 200:].unflatten(0, (2, 2)).flatten(1, 2).double()
    exact = held_out @ keys.double().transpose(1, 2)
    attention = (exact * layer.facts.softmax_scale).softmax(-1)
    lost = []
    for floor in (codes.FLOOR, 1e6):
        monkeypatch.setattr(codes, "FLOOR", floor)
        built = SMALL.build_layer(layer)
        found = (held_out @ built["query_turn"].double()) @ _decoded(built).transpose(1, 2)
        lost.append(float((attention * (found - exact).square()).sum(-1).mean()))
    assert lost[0] < 0.8 * lost[1]


def test_what_a_token_is_attended_is_the_mean_of_roots_over_the_queries() -> None:
    layer = layer_input(middle=90, positions=20)
    assert layer.queries is not None
    grouped = layer.queries.unflatten(0, (2, 2))
    found = attended(layer.keys, grouped, layer.facts)
    logits = torch.einsum("hgpd,hmd->hgpm", grouped.double(), layer.keys.double()) * layer.facts.softmax_scale
    assert_close(found, logits.softmax(-1).mean(1).sqrt().mean(1), 1e-5)


def test_queries_that_are_all_zero_turn_nothing_away() -> None:
    turn = query_turn(normal(0, 2, 50, 16), torch.zeros(2, 8, 16), 4, torch.ones(2, 50))
    assert bool(turn.isfinite().all())
    assert int(torch.linalg.matrix_rank(turn.float()).min()) == 16


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_masses_and_values_are_those_of_what_the_codes_leave_of_each_query(softcap: float | None) -> None:
    """By definition, in float64, a query and a token after the other."""
    layer = layer_input(middle=90, positions=120)
    layer = replace(layer, facts=layer.facts.model_copy(update={"softcap": softcap}))
    built = SMALL.build_layer(layer)
    assert layer.queries is not None
    taken, scale = max(1, round(TAKEN * 90)), layer.facts.softmax_scale

    def logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        found = queries.double() @ keys.double().T * scale
        return found if softcap is None else softcap * torch.tanh(found / softcap)

    named = _decoded(built)
    for head, (keys, values) in enumerate(zip(layer.keys, layer.values, strict=True)):
        ends = built["token_offsets"][head].tolist()
        order = (built["token_order"][head] - layer.split.sinks).long().tolist()
        members = [order[first:last] for first, last in pairwise(ends)]
        group = layer.queries.unflatten(0, (2, 2))[head]
        masses, expected = torch.zeros(len(members)).double(), torch.zeros(len(members)).double()
        outputs = torch.zeros(len(members), 16).double()
        for position in range(0, 120, FIT_EVERY):
            shares = logits(group[:, position], keys).softmax(-1)
            totals = logits(group[:, position], keys).logsumexp(-1, keepdim=True)
            estimated = logits(group[:, position].double() @ built["query_turn"][head].double(), named[head])
            best = set((estimated - totals).exp().mean(0).topk(taken).indices.tolist())
            means = (logits(group[:, position], built["level0.centroids"][head]) - totals).exp().sum(0)
            for cluster, tokens in enumerate(members):
                left = [token for token in tokens if token not in best]
                expected[cluster] += len(left) * means[cluster]
                masses[cluster] += shares[:, left].sum()
                outputs[cluster] += (shares[:, left].sum(0)[:, None] * values[left].double()).sum(0)
        prior = PRIOR * masses.mean()
        plain = built["level0.value_centroids"][head].double()
        assert_close(built["rest_bias"][head], ((masses + prior) / (expected + prior)).log(), 1e-4)
        assert_close(built["rest_values"][head], (outputs + prior * plain) / (masses + prior)[:, None], 1e-4)


def test_an_empty_cluster_weighs_nothing_where_all_logits_are_far_below_zero() -> None:
    """Singling out all outliers leaves a cluster without keys, whose mean of zeros has a logit of zero."""
    layer, bias = layer_input(middle=200), torch.full((16,), 8.0)
    assert layer.queries is not None
    loud = replace(layer, keys=layer.keys + bias, queries=layer.queries - bias)
    built = replace(SMALL, outliers=1.0).build_layer(loud)
    assert int(built["level0.counts"].amin()) == 0
    assert bool(built["rest_bias"].isfinite().all())


def test_clusters_are_those_of_multipole() -> None:
    layer = layer_input(middle=200)
    built = SMALL.build_layer(layer)
    assert built["rest_bias"].shape == built["level0.counts"].shape == (2, 20)
    assert built["rest_values"].shape == built["level0.value_centroids"].shape


@settings(max_examples=4)
@given(seed=st.integers(0, 10**6), more=st.integers(1, 60))
def test_new_keys_are_encoded_by_the_old_turn_and_codebooks(seed: int, more: int) -> None:
    grown = layer_input(seed, middle=256 + more)
    built = SMALL.build_layer(_first(grown, 256))
    appended = SMALL.append_layer(built, grown, 256)
    assert appended.keys() == built.keys()
    for name in ("query_turn", "codebooks"):
        assert torch.equal(appended[name], built[name])
    assert torch.equal(appended["codes"][:, :256], built["codes"])
    assert appended["codes"].shape == (2, 256 + more, 4)
    assert int(appended["level0.counts"].sum()) == 2 * (256 + more)
    again = codes._rest(grown, appended, appended)
    assert all(torch.equal(appended[name], again[name]) for name in ("rest_bias", "rest_values"))


def test_codebooks_of_a_few_keys_are_made_again() -> None:
    grown = layer_input(5, middle=90)
    appended = SMALL.append_layer(SMALL.build_layer(_first(grown, 40)), grown, 40)
    assert appended["codebooks"].shape[2] == 90
    again = SMALL.build_layer(grown)
    assert torch.equal(appended["codes"], again["codes"])


def _first(layer: LayerInput, middle: int) -> LayerInput:
    split = layer.split.model_copy(update={"middle": middle})
    return replace(layer, keys=layer.keys[:, :middle], values=layer.values[:, :middle], split=split)


def test_the_same_seed_gives_the_same_index() -> None:
    first, again = (SMALL.build_layer(layer_input(3, middle=400)) for _ in range(2))
    assert all(torch.equal(one, again[name]) for name, one in first.items())


@pytest.mark.parametrize(
    ("channels", "given", "found"), [(128, 4, 4), (192, 4, 8), (192, 64, 64), (256, 4, 8), (256, 256, 256)]
)
def test_larger_heads_have_codes_of_twice_as_many_bytes(channels: int, given: int, found: int) -> None:
    """Where these divide the channels."""
    keys, queries = normal(0, 1, 40, channels), normal(1, 2, 8, channels)
    layer = replace(layer_input(), keys=keys, values=keys, queries=queries)
    built = replace(SMALL, code_bytes=given).build_layer(layer)
    assert built["codes"].shape[2] == built["codebooks"].shape[1] == found


def test_it_is_what_is_built_by_default() -> None:
    assert choose_indexers([]) == ["codes"]


def test_parameters_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="--code-bytes 0: give at least 1"):
        CodesIndexer(code_bytes=0)
    with pytest.raises(UsageError, match="--query-sample 0: give at least 1"):
        CodesIndexer(query_sample=0)
    with pytest.raises(UsageError, match=r"--levels 0\.1,0\.02: codes has one level; give one share"):
        CodesIndexer(levels=(0.1, 0.02))
    with pytest.raises(UsageError, match="--code-bytes 5: the model's heads have 16 channels; give a divisor"):
        small_plan(methods={"codes": CodesIndexer(code_bytes=5)})
