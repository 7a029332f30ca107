"""Posting lists laid out by token: each score is decoded at its token, to within the rounding of its code."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.small_tables import tabled_layer

from sparsekv.kernels.posting_lists.posting_lists import (
    HIGHEST,
    SCORINGS,
    TILE_TOKENS,
    Tables,
    encode_lists,
    score_of_others,
    unpacked,
)


def tables_of(seed: int, keys: int, scores: torch.Tensor) -> Tables:
    """Lists with scores [Hk, m, C, L] of random tokens, where the first key is token 3."""
    drawn = torch.rand(*scores.shape[:3], keys, generator=torch.Generator().manual_seed(seed))
    tokens = drawn.topk(scores.shape[3], -1).indices.sort(-1).values.int() + 3
    base = tabled_layer(seed).tables
    return replace(base, tokens=tokens, scores=scores.half(), keys=keys, first_token=3)


@given(st.integers(0, 10**6), st.sampled_from([40, TILE_TOKENS - 1, TILE_TOKENS, 2 * TILE_TOKENS + 17]))
@settings(max_examples=10)
def test_each_score_is_where_its_token_is(seed: int, keys: int) -> None:
    """Scores in 15 equal steps are exact; tokens that are not listed, and padding past the last key, have code 0."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, HIGHEST + 1, (2, 4, 6, 20), generator=generator)
    scores[..., 0] = HIGHEST
    tables = tables_of(seed, keys, 0.5 * scores)
    lists = encode_lists(tables, "paper")
    codes = unpacked(lists.codes)
    expected = torch.zeros_like(codes).scatter_(-1, tables.tokens.long() - 3, scores.int())
    assert torch.equal(codes, expected)
    assert torch.equal(lists.steps, torch.full_like(lists.steps, 0.5))
    assert not bool(lists.origins.any())


@pytest.mark.parametrize("scoring", SCORINGS)
def test_no_score_is_further_off_than_half_a_step_or_above_the_highest(scoring: str) -> None:
    tables = tabled_layer().tables
    lists = encode_lists(tables, scoring)
    found = lists.origins[..., None] + lists.steps[..., None] * unpacked(lists.codes)[..., : tables.keys]
    others = score_of_others(tables.scores.float(), tables.centroids, tables.key_mean[:, :, None], tables.keys, scoring)
    exact = others[..., None].repeat(1, 1, 1, tables.keys)
    exact.scatter_(-1, tables.tokens.long() - tables.first_token, tables.scores.float())
    highest = (lists.origins + HIGHEST * lists.steps)[..., None]
    assert bool(((found - exact.minimum(highest)).abs() <= 0.501 * lists.steps[..., None]).all())


def test_one_score_far_above_all_others_leaves_these_told_apart() -> None:
    scores = normal(0, 2, 4, 6, 20_000).abs()
    scores[..., 7] = 30
    tables = tables_of(1, 25_000, scores)
    lists = encode_lists(tables, "paper")
    found = lists.steps[..., None] * unpacked(lists.codes).gather(-1, tables.tokens.long() - 3)
    usual = torch.arange(20_000) != 7
    assert float((found - scores)[..., usual].square().mean().sqrt()) < 0.2
    assert bool((found[..., 7] == found.amax(-1)).all())
