"""Logits from tables: each scoring against its definition in float64, and exact where tables lose nothing."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.reference import assert_close
from support.small_tables import SMALL, layer_input, tabled_layer
from torch.nn.functional import normalize

from sparsekv.indexing.methods.csattention import CSAttentionIndexer
from sparsekv.kernels.posting_lists.posting_lists import (
    SCORINGS,
    Lookup,
    Tables,
    centroids_used,
    cosines,
    estimate_logits,
    fit_weights,
    look_up,
)

properties = settings(max_examples=15)
SCALE = 0.3


def _by_definition(tables: Tables, keys: torch.Tensor, query: torch.Tensor, scoring: str) -> torch.Tensor:
    """[R, M] float64 for one head: keys [M, D], queries [R, D], list by list and key by key."""
    logits = torch.zeros(len(query), len(keys), dtype=torch.float64)
    for part, channels in enumerate(tables.channels):
        centroids = tables.centroids[0, part].double()
        scores = centroids @ keys[:, channels].double().T
        for row, of_query in enumerate(query[:, channels].double()):
            nearest = int((centroids @ of_query).argmax())
            listed = (tables.tokens[0, part, nearest] - tables.first_token).tolist()
            others = [token for token in range(len(keys)) if token not in listed]
            missing = {
                "paper": torch.zeros(()).double(),
                "floor": scores[nearest, listed].amin(),
                "mean": scores[nearest, others].mean() if others else torch.zeros(()).double(),
            }[scoring]
            reach = 1.0 if scoring == "paper" else max(0.0, float(centroids[nearest] @ of_query))
            estimate = missing.repeat(len(keys))
            estimate[listed] = scores[nearest, listed]
            logits[row] += reach * estimate
    return logits


@properties
@given(seed=st.integers(0, 10**6), alpha=st.sampled_from([0.01, 0.3, 1.0]))
@pytest.mark.parametrize("scoring", SCORINGS)
def test_logits_are_the_lists_summed_by_key(scoring: str, seed: int, alpha: float) -> None:
    tabled = tabled_layer(seed, replace(SMALL, alpha=alpha), layer_input(seed, middle=30, Hk=1))
    query = tabled.layer.queries.flatten(1, 2)
    tables = tabled.tables
    estimated = estimate_logits(tables, look_up(tables, query), scoring)
    assert_close(estimated[0], _by_definition(tables, tabled.given.keys[0], query[0], scoring), 2e-3)


def test_a_centroid_for_each_query_and_whole_lists_give_the_exact_logits() -> None:
    given = layer_input(positions=10)
    assert given.queries is not None
    tabled = tabled_layer(0, CSAttentionIndexer(subspace_size=16, centroids=20, alpha=1.0), given)
    query = given.queries.unflatten(0, (2, -1)).flatten(1, 2)
    logits = estimate_logits(tabled.tables, look_up(tabled.tables, query), "mean")
    assert_close(logits, query.double() @ given.keys.double().transpose(1, 2), 1e-3)


def test_a_part_is_given_its_nearest_centroid_by_cosine() -> None:
    tables = tabled_layer().tables
    query = normal(9, 2, 5, 16)
    lookup = look_up(tables, query)
    parts = torch.stack([query[..., channels] for channels in tables.channels], 1).double()
    expected = normalize(parts, dim=-1) @ tables.centroids.double().transpose(-1, -2)
    assert_close(cosines(tables, query), expected, 1e-6)
    assert torch.equal(lookup.nearest[..., 0], expected.argmax(-1))
    assert torch.equal(lookup.share, torch.ones(2, 4, 5, 1))


def test_a_part_below_the_backoff_is_given_two_centroids_half_each() -> None:
    tables = tabled_layer().tables
    query = normal(9, 2, 50, 16)
    best = cosines(tables, query).topk(2, -1)
    threshold = float(best.values[..., 0].median())
    lookup = look_up(tables, query, threshold)
    below = best.values[..., 0] < threshold
    assert 0 < int(below.sum()) < below.numel()
    assert torch.equal(lookup.nearest, best.indices)
    assert torch.equal(lookup.share[..., 1], 0.5 * below)
    assert torch.equal(lookup.share.sum(-1), torch.ones(2, 4, 50))
    halves = [
        Lookup(lookup.parts, lookup.nearest[..., place : place + 1], lookup.share[..., :1] * 0 + 1) for place in (0, 1)
    ]
    alone, second = (estimate_logits(tables, one, "floor") for one in halves)
    backed = below.all(1)
    mixed = estimate_logits(tables, look_up(tables, query, 2.0), "floor")
    assert_close(mixed, (alone + second) / 2, 1e-5)
    assert_close(estimate_logits(tables, lookup, "floor")[backed], mixed[backed], 1e-5)


def test_weights_multiply_the_subspaces() -> None:
    tables = tabled_layer().tables
    query, weights = normal(9, 2, 5, 16), torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]])
    weighted = estimate_logits(tables, look_up(tables, query, weights=weights), "mean")
    for head, part, weight in ((0, 0, 1.0), (1, 1, 2.0)):
        alone = replace(
            tables,
            **{
                name: getattr(tables, name)[:, part : part + 1]
                for name in ("centroids", "tokens", "scores", "key_mean")
            },
            channels=tables.channels[part : part + 1],
        )
        assert_close(weighted[head], weight * estimate_logits(alone, look_up(alone, query), "mean")[head], 1e-5)


@properties
@given(seed=st.integers(0, 10**6), together=st.sampled_from([1, 2, 3, 6]))
def test_a_list_that_several_queries_read_counts_once(seed: int, together: int) -> None:
    tables, weights = tabled_layer().tables, torch.tensor([[1.0, -0.5, 1.0, 0.0], [2.0, 1.0, -1.0, 1.0]])
    lookup = look_up(tables, normal(seed, 2, 6, 16), 0.8, weights)
    used = centroids_used(tables, lookup, together)
    for head in range(2):
        for group in range(6 // together):
            rows = range(group * together, (group + 1) * together)
            lists = {
                (part, int(lookup.nearest[head, part, row, place]))
                for part in range(4)
                for row in rows
                for place in range(2)
                if lookup.share[head, part, row, place]
            }
            assert used[head, group] == len(lists)


def _squared_error(
    tables: Tables, weights: torch.Tensor | None, query: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Error [Hk] float64 that `fit_weights` minimises, with an offset of each query left free."""
    logits = query.double() @ keys.double().transpose(1, 2)
    importance = (logits * SCALE).softmax(-1).sqrt()
    importance = importance / importance.sum(-1, keepdim=True)
    missing = logits - estimate_logits(tables, look_up(tables, query, weights=weights), "mean").double()
    missing = missing - (missing * importance).sum(-1, keepdim=True)
    return (missing.square() * importance).sum((-1, -2))


@properties
@given(seed=st.integers(0, 10**6))
def test_fitted_weights_are_the_best(seed: int) -> None:
    tabled = tabled_layer(seed)
    tables, keys, query = tabled.tables, tabled.given.keys, normal(seed + 9, 2, 40, 16)
    fitted = fit_weights(tables, query, keys, SCALE)
    best = _squared_error(tables, fitted, query, keys)
    assert bool((best < _squared_error(tables, None, query, keys)).all())
    for nudge in 0.1 * normal(seed + 10, 5, 2, 4):
        # The ridge moves the weights away from the minimum by about 0.01.
        assert bool((best < 1.001 * _squared_error(tables, fitted + nudge, query, keys)).all())


def test_of_a_single_key_all_weights_are_one() -> None:
    """Weights of subspaces tell keys apart, and a single key has no other key."""
    given = layer_input(0, middle=1)
    tabled = tabled_layer(0, given=given)
    fitted = fit_weights(tabled.tables, normal(1, 2, 40, 16), given.keys, SCALE)
    assert torch.equal(fitted, torch.ones_like(fitted))
