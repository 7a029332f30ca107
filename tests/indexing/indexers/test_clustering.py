"""k-means: what its labels promise, on the path for the CPU and on the path for a GPU alike."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import clustered, normal
from support.reference import assert_close

from sparsekv.indexing.indexers.cluster_indexer import kmeans
from sparsekv.kernels.kmeans.kmeans import SPACES, cluster_means, random_kmeans, to_space

KMeans = Callable[[torch.Tensor, int, int, int, torch.Tensor], torch.Tensor]


def _torch(points: torch.Tensor, clusters: int, iterations: int, seed: int, valid: torch.Tensor) -> torch.Tensor:
    return random_kmeans(points, clusters, iterations, torch.Generator().manual_seed(seed), valid)


PATHS: dict[str, KMeans] = {"faiss": kmeans, "torch": _torch}
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())


def _all(points: torch.Tensor) -> torch.Tensor:
    return torch.ones(points.shape[:2], dtype=torch.bool)


def _inertia(points: torch.Tensor, labels: torch.Tensor, clusters: int) -> float:
    means, _ = cluster_means(points, labels, clusters)
    return float((points - means.gather(1, labels[..., None].expand_as(points))).square().sum())


@every_path
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), clusters=st.integers(1, 12))
def test_a_converged_clustering_puts_each_point_at_its_nearest_mean(path: KMeans, seed: int, clusters: int) -> None:
    points = normal(seed, 2, 120, 4)
    labels = path(points, clusters, 300, seed, _all(points))
    means, counts = cluster_means(points, labels, clusters)
    distances = torch.cdist(points.double(), means.double()).masked_fill(counts[:, None] == 0, torch.inf)
    own = distances.gather(2, labels[..., None])[..., 0]
    assert bool((own <= distances.amin(2) + 1e-5).all())


@every_path
def test_the_same_seed_gives_the_same_labels_and_another_seed_others(path: KMeans) -> None:
    points = normal(0, 2, 300, 8)
    first, again, other = (path(points, 20, 10, seed, _all(points)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@every_path
def test_as_many_clusters_as_distinct_points_gives_each_its_own(path: KMeans) -> None:
    points = normal(1, 2, 40, 8)
    labels = path(points, 40, 10, 0, _all(points))
    assert torch.equal(labels.sort(dim=1).values, torch.arange(40).expand(2, -1))


@every_path
@pytest.mark.parametrize("distinct", [1, 3])
def test_repeated_points_of_fewer_kinds_than_clusters_stay_with_their_kind(path: KMeans, distinct: int) -> None:
    kinds = torch.arange(60) % distinct
    points = 5 * normal(2, 1, distinct, 8)[:, kinds]
    labels = path(points, 8, 10, 0, _all(points))
    assert int(labels.min()) >= 0
    assert int(labels.max()) < 8
    of_label = [set(kinds[labels[0] == label].tolist()) for label in labels.unique().tolist()]
    assert all(len(members) == 1 for members in of_label)


@every_path
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), left_out=st.floats(0.0, 0.8))
def test_points_that_take_no_part_change_nothing_and_get_label_0(path: KMeans, seed: int, left_out: float) -> None:
    points = normal(seed, 2, 80, 4)
    valid = torch.rand(2, 80, generator=torch.Generator().manual_seed(seed)) >= left_out
    valid[:, :6] = True
    changed = torch.where(valid[..., None], points, 100 + points)
    labels, again = path(points, 6, 8, 0, valid), path(changed, 6, 8, 0, valid)
    assert torch.equal(labels, again)
    assert not labels[~valid].any()


def test_both_paths_cluster_equally_well() -> None:
    # Overlapping groups: with separate ones a single unlucky seed decides which path looks better.
    points = 0.3 * clustered(3, 2, 2000, 8, 60) + normal(4, 2, 2000, 8)
    inertia = {name: _inertia(points, path(points, 50, 20, 0, _all(points)), 50) for name, path in PATHS.items()}
    assert 0.95 < inertia["torch"] / inertia["faiss"] < 1.05
    unclustered = torch.zeros(2, 2000, dtype=torch.int64)
    assert max(inertia.values()) < 0.6 * _inertia(points, unclustered, 1)


def test_more_points_than_are_compared_at_once_are_all_labelled() -> None:
    points = clustered(4, 1, 20_000, 4, 3)
    labels = _torch(points, 3, 4, 0, _all(points))
    centres, _ = cluster_means(points, labels, 3)
    nearest = torch.cdist(points, centres).argmin(2)
    assert float((labels == nearest).float().mean()) > 0.95
    assert labels.shape == (1, 20_000)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), points=st.integers(1, 50), clusters=st.integers(1, 12), weighted=st.booleans())
def test_means_and_weights_of_clusters_are_those_numpy_computes(
    seed: int, points: int, clusters: int, weighted: bool
) -> None:
    rows = normal(seed, 2, points, 3) + 2
    labels = torch.randint(clusters, (2, points), generator=torch.Generator().manual_seed(seed))
    weights = 1 + torch.arange(2 * points).view(2, points) % 5 if weighted else None
    means, totals = cluster_means(rows, labels, clusters, weights)
    expected, sums = np.zeros((2, clusters, 3)), np.zeros((2, clusters))
    for head in range(2):
        for cluster in range(clusters):
            chosen = (labels[head] == cluster).numpy()
            own = np.ones(int(chosen.sum())) if weights is None else weights[head].numpy()[chosen].astype(float)
            sums[head, cluster] = own.sum()
            if chosen.any():
                expected[head, cluster] = np.average(rows[head].double().numpy()[chosen], axis=0, weights=own)
    assert_close(means, torch.from_numpy(expected), 1e-5)
    assert torch.equal(totals.double(), torch.from_numpy(sums))


def test_spaces_are_unit_vectors_raw_and_unit_after_centring() -> None:
    keys = normal(5, 2, 30, 8).bfloat16() + 3
    spaces = {space: to_space(keys, space) for space in SPACES}
    assert all(points.dtype == torch.float32 for points in spaces.values())
    assert torch.equal(spaces["raw"], keys.float())
    assert_close(spaces["normalised"].norm(dim=-1), torch.ones(2, 30), 1e-5)
    assert_close(spaces["normalised"] * keys.float().norm(dim=-1, keepdim=True), keys.float(), 1e-5)
    centred = keys.double() - keys.double().mean(1, keepdim=True)
    assert_close(spaces["centred"], centred / centred.norm(dim=-1, keepdim=True), 1e-5)


@pytest.mark.parametrize("space", SPACES)
def test_points_that_take_no_part_change_no_other_in_any_space(space: str) -> None:
    """As the zeros do that stand for empty clusters, of which each head has its own."""
    points, valid = normal(6, 2, 30, 8) + 3, torch.arange(30) < torch.tensor([[20], [25]])
    seen = to_space(points.masked_fill(~valid[..., None], 0), space, valid)
    for head, of_head in enumerate(valid):
        assert_close(seen[head, of_head], to_space(points[None, head, of_head], space)[0], 1e-5)
