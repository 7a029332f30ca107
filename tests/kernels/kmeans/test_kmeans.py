"""The parts of k-means: nearest centres, means, iterations and the last assignment."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import clustered, normal
from support.reference import assert_close

from sparsekv.kernels.kmeans.kmeans import (
    CENTRES,
    SCORES_AT_ONCE,
    ShortPoints,
    assign,
    cluster_means,
    lloyd,
    nearest_centres,
    random_kmeans,
    random_points,
)

properties = settings(max_examples=25)
seeds = st.integers(0, 10**6)


def _distances(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Squared distances [Hk, M, C] float64."""
    return (points.double()[:, :, None] - centres.double()[:, None]).square().sum(-1)


def _inertia(points: torch.Tensor, labels: torch.Tensor, centres: torch.Tensor) -> float:
    return float(_distances(points, centres).gather(2, labels[..., None]).sum())


@properties
@given(seed=seeds, clusters=st.integers(1, 20), far=st.sampled_from([0.0, 30.0]))
def test_a_point_is_assigned_to_its_nearest_centre_by_euclidean_distance(seed: int, clusters: int, far: float) -> None:
    """Centres have very different norms, so that the largest product is not the shortest distance."""
    scale = torch.linspace(0.1, 3, clusters)[:, None]
    points, centres = far + normal(seed, 2, 50, 5), far + scale * normal(seed + 1, 2, clusters, 5)
    distances, labels = _distances(points, centres), assign(points, centres)
    chosen = distances.gather(2, labels[..., None])[..., 0]
    assert bool((chosen <= distances.amin(-1) + 1e-5 * (1 + far**2)).all())


def test_points_past_those_that_are_compared_at_once_are_assigned_too() -> None:
    points, centres = normal(0, 1, SCORES_AT_ONCE // 3 + 5, 2), normal(1, 1, 3, 2)
    assert torch.equal(assign(points, centres), _distances(points, centres).argmin(-1))


@properties
@given(seed=seeds, clusters=st.integers(1, 12), iterations=st.integers(0, 6))
def test_labels_are_of_one_last_assignment_to_the_centres_that_come_with_them(
    seed: int, clusters: int, iterations: int
) -> None:
    points = normal(seed, 2, 60, 4)
    labels, centres = lloyd(points, points[:, :clusters], iterations)
    assert centres.shape == (2, clusters, 4)
    assert torch.equal(labels, assign(points, centres))


@properties
@given(seed=seeds, clusters=st.integers(2, 12))
def test_an_iteration_is_an_assignment_and_the_means_of_it(seed: int, clusters: int) -> None:
    points = normal(seed, 2, 60, 4)
    means, _ = cluster_means(points, assign(points, points[:, :clusters]), clusters)
    _, centres = lloyd(points, points[:, :clusters], 1)
    # Each centre is a point here, so that no cluster is empty.
    assert_close(centres, means, 1e-6)


@properties
@given(seed=seeds, scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_weighted_means_are_those_of_points_that_are_there_so_many_times(seed: int, scale: float) -> None:
    points = normal(seed, 2, 30, 4)
    times = torch.randint(1, 5, (30,), generator=torch.Generator().manual_seed(seed))
    labels = assign(points, points[:, :5])
    means, totals = cluster_means(points, labels, 6, scale * times.float().expand(2, -1))
    expected, numbers = cluster_means(points.repeat_interleave(times, 1), labels.repeat_interleave(times, 1), 6)
    assert_close(means, expected, 1e-5)
    assert_close(totals, scale * numbers, 1e-5)
    assert not means[:, 5].any()


@properties
@given(seed=seeds, number=st.integers(1, 40))
def test_weighted_points_are_different_ones_by_their_weights(seed: int, number: int) -> None:
    points = torch.arange(40.0).expand(2, -1)[..., None]
    weights = torch.where(torch.arange(40) % 2 == 0, 1.0, 1e-9).expand(2, -1)
    drawn = random_points(points, number, torch.Generator().manual_seed(seed), weights=weights)[..., 0]
    assert bool((drawn.diff() > 0).all())
    assert int((drawn % 2 == 0).sum(1).min()) == min(number, 20)


@properties
@given(seed=seeds, clusters=st.integers(1, 12))
def test_more_iterations_never_bring_points_further_from_their_centres(seed: int, clusters: int) -> None:
    points = clustered(seed, 2, 80, 4, 6)
    inertias = [_inertia(points, *lloyd(points, points[:, :clusters], iterations)) for iterations in range(6)]
    assert all(after <= before * (1 + 1e-5) for before, after in pairwise(inertias))


def test_a_centre_that_no_point_is_nearest_to_stays_where_it_is() -> None:
    points = normal(2, 1, 40, 3)
    start = torch.cat([points[:, :2], torch.full((1, 1, 3), 100.0)], 1)
    labels, centres = lloyd(points, start, 4)
    assert centres[0, 2].tolist() == [100.0] * 3
    assert set(labels.flatten().tolist()) == {0, 1}


@properties
@given(seed=seeds, left_out=st.floats(0.0, 0.8))
def test_points_of_weight_0_move_no_centre(seed: int, left_out: float) -> None:
    points = normal(seed, 2, 60, 4)
    weights = (torch.rand(2, 60, generator=torch.Generator().manual_seed(seed)) >= left_out).float()
    weights[:, :5] = 1
    _, centres = lloyd(points, points[:, :5], 4, weights)
    _, moved = lloyd(torch.where(weights[..., None] > 0, points, points + 50), points[:, :5], 4, weights)
    assert torch.equal(centres, moved)


@pytest.mark.parametrize("clusters", [1, 7, 30])
def test_random_kmeans_starts_from_points_of_each_head_that_take_part(clusters: int) -> None:
    """Without iterations the centres are points: with as many clusters as valid points, each point has its own."""
    points = normal(3, 2, 60, 4)
    valid = torch.arange(60) >= 30
    labels = random_kmeans(points, clusters, 0, torch.Generator().manual_seed(0), valid.expand(2, -1))
    assert not labels[:, ~valid].any()
    filled = [set(of_head[valid].tolist()) for of_head in labels]
    # Each centre is nearest to itself.
    assert filled == [set(range(clusters))] * 2


@pytest.mark.parametrize("channels", [2, 4, 8])
@pytest.mark.parametrize(("batch", "points"), [(1, 1), (3, 50), (24, 700)])
def test_short_points_are_assigned_by_faiss_to_their_nearest_centres(batch: int, points: int, channels: int) -> None:
    """As many parts as there are; also of rows that lie apart."""
    rows = normal(0, batch, channels, points).transpose(1, 2)
    centres = torch.linspace(0.1, 3, CENTRES)[:, None] * normal(1, batch, CENTRES, channels)
    nearest = nearest_centres(rows, CENTRES)
    assert isinstance(nearest, ShortPoints)
    distances, labels = _distances(rows, centres), nearest(centres)
    chosen = distances.gather(2, labels[..., None])[..., 0]
    assert labels.shape == (batch, points)
    assert bool((chosen <= distances.amin(-1) + 1e-5).all())
    assert torch.equal(nearest(centres.flip(1)), CENTRES - 1 - labels)


@pytest.mark.parametrize(("channels", "number"), [(3, CENTRES), (16, CENTRES), (8, CENTRES - 1)])
def test_other_points_are_assigned_by_products(channels: int, number: int) -> None:
    points, centres = normal(0, 2, 60, channels), normal(1, 2, number, channels)
    nearest = nearest_centres(points, number)
    assert not isinstance(nearest, ShortPoints)
    assert torch.equal(nearest(centres), _distances(points, centres).argmin(-1))
