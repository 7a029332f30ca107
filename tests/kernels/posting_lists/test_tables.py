"""Tables: every channel is used once, centroids are of spherical k-means, lists have the highest scores."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.reference import assert_close
from torch.nn.functional import normalize

from sparsekv.kernels.posting_lists.posting_lists import (
    cosine_kmeans,
    insert,
    nearest,
    rope_pair_order,
    split_channels,
    top_lists,
)

properties = settings(max_examples=25)


@pytest.mark.parametrize(
    ("head_dim", "pairs", "interleaved", "expected"),
    [
        (8, 4, False, [0, 4, 1, 5, 2, 6, 3, 7]),
        (8, 2, False, [0, 2, 1, 3, 4, 5, 6, 7]),
        (8, 4, True, [0, 1, 2, 3, 4, 5, 6, 7]),
        (6, 2, True, [0, 1, 2, 3, 4, 5]),
        (4, 0, False, [0, 1, 2, 3]),
    ],
)
def test_channels_that_turn_together_are_neighbours(
    head_dim: int, pairs: int, interleaved: bool, expected: list[int]
) -> None:
    assert rope_pair_order(head_dim, pairs, interleaved=interleaved).tolist() == expected


def test_parts_are_the_named_channels() -> None:
    rows, channels = normal(0, 2, 5, 8), torch.tensor([[0, 4], [1, 5], [2, 6], [3, 7]])
    parts = split_channels(rows, channels)
    assert parts.shape == (2, 4, 5, 2)
    for part, of_part in enumerate(channels.tolist()):
        assert torch.equal(parts[:, part], rows[..., of_part])


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_centroid_is_the_direction_of_the_sum_of_the_points_nearest_to_it() -> None:
    """Norms have no effect, and after enough iterations another one would change nothing."""
    points = normal(0, 3, 200, 4) * normal(1, 3, 200, 1).exp()
    centroids = cosine_kmeans(points, 7, 60, _generator())
    assert_close(centroids, cosine_kmeans(normalize(points, dim=-1), 7, 60, _generator()), 1e-5)
    unit = normalize(points.double(), dim=-1)
    members = torch.nn.functional.one_hot((unit @ centroids.double().transpose(1, 2)).argmax(-1), 7).double()
    assert_close(centroids, normalize(members.transpose(1, 2) @ unit, dim=-1), 1e-5)


def test_as_many_centroids_as_directions_are_these() -> None:
    directions = normalize(normal(0, 2, 9, 4), dim=-1)
    points = directions[:, torch.arange(50) % 9] * (1 + torch.arange(50.0))[:, None]
    centroids = cosine_kmeans(points, 9, 3, _generator())
    cosines = centroids @ directions.transpose(1, 2)
    assert_close(cosines.amax(1), torch.ones(2, 9), 1e-6)
    assert_close(cosines.amax(2), torch.ones(2, 9), 1e-6)


def test_fewer_directions_than_centroids_leave_no_centroid_without_one() -> None:
    points = normal(0, 2, 3, 4).repeat(1, 8, 1)
    centroids = cosine_kmeans(points, 10, 4, _generator())
    assert_close((centroids @ normalize(points, dim=-1).transpose(1, 2)).amax(-1), torch.ones(2, 10), 1e-6)


def test_points_without_a_direction_do_no_harm() -> None:
    points = torch.cat([torch.zeros(1, 20, 4), normal(0, 1, 20, 4)], 1)
    assert bool(torch.isfinite(cosine_kmeans(points, 6, 5, _generator())).all())


def test_more_rounds_come_nearer() -> None:
    points = normal(0, 1, 500, 6)
    unit = normalize(points, dim=-1)
    seeds, centroids = (cosine_kmeans(points, 12, rounds, _generator()) for rounds in (0, 10))
    best = [(unit @ some.transpose(1, 2)).amax(-1).mean() for some in (seeds, centroids)]
    assert best[1] > best[0] + 0.02
    assert torch.equal(nearest(unit, centroids), (unit @ centroids.transpose(1, 2)).argmax(-1))


@properties
@given(seed=st.integers(0, 10**6), middle=st.integers(1, 60), share=st.floats(0.01, 1))
def test_lists_hold_the_keys_of_highest_score_in_order_of_position(seed: int, middle: int, share: float) -> None:
    length = max(1, round(share * middle))
    centroids, keys = normal(seed, 2, 3, 4, 5), normal(seed + 1, 2, 3, middle, 5)
    positions, scores = top_lists(centroids, keys, length)
    assert (positions.dtype, scores.dtype) == (torch.int32, torch.float16)
    exact = centroids.double() @ keys.double().transpose(-1, -2)
    assert bool((positions.diff(dim=-1) > 0).all())
    assert_close(scores, exact.gather(-1, positions.long()), 1e-3)
    assert torch.equal(positions.long(), exact.topk(length, -1).indices.sort(-1).values)


def _one_by_one(tokens: list[int], scores: list[float], new: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """The paper's update: a new key whose score exceeds the list's minimum replaces that entry."""
    entries = list(zip(tokens, scores, strict=True))
    for token, score in new:
        lowest = min(score for _, score in entries)
        if score > lowest:
            last = max(place for place, entry in enumerate(entries) if entry[1] == lowest)
            entries = [*entries[:last], *entries[last + 1 :], (token, score)]
    return [token for token, _ in entries], [score for _, score in entries]


# A few different scores, so that many are equal.
few = st.integers(-3, 3).map(lambda score: score / 2)


@properties
@given(
    old=st.lists(few, min_size=1, max_size=12),
    new=st.lists(few, max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=4),
)
def test_however_new_keys_come_the_lists_are_those_of_one_after_the_other(
    old: list[float], new: list[float], cuts: list[int]
) -> None:
    tokens, scores = torch.arange(len(old), dtype=torch.int32)[None], torch.tensor([old]).half()
    numbers, tried = torch.arange(len(old), len(old) + len(new)), torch.tensor([new]).half()
    for piece in torch.arange(len(new)).tensor_split(sorted(min(cut, len(new)) for cut in cuts)):
        tokens, scores = insert(tokens, scores, numbers[piece], tried[:, piece])
    expected = _one_by_one(list(range(len(old))), old, list(zip(numbers.tolist(), new, strict=True)))
    assert (tokens[0].tolist(), scores[0].tolist()) == expected


@properties
@given(
    old=st.lists(few, min_size=1, max_size=6),
    new=st.lists(few | st.sampled_from([torch.nan, torch.inf, -torch.inf]), max_size=12),
)
def test_scores_that_are_no_numbers_are_lower_than_all_others(old: list[float], new: list[float]) -> None:
    """Scores that are nan can come from huge keys while a model decodes. Lists must keep their length."""
    tokens, scores = torch.arange(len(old), dtype=torch.int32)[None], torch.tensor([old]).half()
    numbers, tried = torch.arange(len(old), len(old) + len(new)), torch.tensor([new]).half()
    found, _ = insert(tokens, scores, numbers, tried)
    lower = [-torch.inf if math.isnan(score) else score for score in new]
    expected = _one_by_one(list(range(len(old))), old, list(zip(numbers.tolist(), lower, strict=True)))
    assert found[0].tolist() == expected[0]
