"""The kernels of k-means against float64: compiled where there is a GPU, in Triton's interpreter elsewhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_runs import DEVICE, compiled_or_interpreted
from support.random_tensors import clustered, normal
from support.reference import assert_close

from sparsekv.kernels.kmeans.kmeans import cluster_means
from sparsekv.kernels.kmeans.kmeans_triton import NearestCentres, Tiles, cluster_means_triton

pytestmark = compiled_or_interpreted
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
dims = pytest.mark.parametrize("D", [64, 96, 128, 256])
properties = settings(max_examples=15)
seeds = st.integers(0, 10**6)


def _nearest(points: torch.Tensor, centres: torch.Tensor, tiles: Tiles | None = None) -> torch.Tensor:
    return NearestCentres(points.to(DEVICE), centres.shape[1], tiles)(centres.to(DEVICE)).cpu()


def _assert_nearest(points: torch.Tensor, centres: torch.Tensor, labels: torch.Tensor) -> None:
    """A chosen centre is further than the nearest by no more than the rounding to float16 around the mean allows."""
    points, centres = points.double(), centres.double()
    assert labels.shape == points.shape[:2]
    assert int(labels.min()) >= 0
    assert int(labels.max()) < centres.shape[1]
    mean = points.mean(1, keepdim=True)
    distances = (points[:, :, None] - centres[:, None]).square().sum(-1).sqrt()
    chosen = distances.gather(2, labels[..., None])[..., 0]
    lengths = (points - mean).norm(dim=-1) + (centres - mean).norm(dim=-1).amax(1, keepdim=True)
    # Rounding changes a distance by 2^-11 of the lengths, and two are compared; squares are summed in float32.
    allowed = ((distances.amin(-1) + 2**-10 * lengths).square() + 2**-19 * lengths.square()).sqrt()
    assert bool((chosen <= allowed).all()), f"further by {float((chosen - allowed).max())}"


@pytest.mark.thinned
@dims
@dtypes
@pytest.mark.parametrize(("count", "clusters"), [(1, 1), (1, 40), (70, 1), (131, 67)])
def test_no_centre_is_nearer_than_the_one_of_the_label(dtype: torch.dtype, D: int, count: int, clusters: int) -> None:
    """The mean is far from 0 compared to the spread, as for keys; centres of several norms are near some points."""
    points = (3 + normal(D, 2, count, D)).to(dtype)
    near = points[:, torch.arange(clusters) % count].float()
    shrunk = 3 + torch.linspace(0.4, 1.2, clusters)[:, None] * (near - 3)
    centres = shrunk + 0.3 * normal(D + 1, 2, clusters, D)
    _assert_nearest(points, centres, _nearest(points, centres))


@properties
@given(seed=seeds, clusters=st.integers(1, 90), scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]))
def test_the_scale_of_the_points_makes_no_difference(seed: int, clusters: int, scale: float) -> None:
    points, centres = scale * clustered(seed, 2, 60, 8, 5), scale * normal(seed, 2, clusters, 8)
    _assert_nearest(points, centres, _nearest(points, centres))


@pytest.mark.parametrize("apart", [0.001, 1.0, 1000.0])
def test_points_that_are_all_one(apart: float) -> None:
    """If all points are equal, only their mean gives a scale; the one centre equal to them is found."""
    points = torch.full((1, 20, 16), 7.0)
    centres = 7 + apart * normal(0, 1, 50, 16)
    centres[0, 33] = 7
    assert _nearest(points, centres).unique().tolist() == [33]


def test_a_centre_further_out_than_float16_reaches_takes_nothing() -> None:
    points, centres = normal(0, 1, 40, 16), torch.cat([torch.full((1, 1, 16), 1e9), normal(1, 1, 3, 16)], 1)
    labels = _nearest(points, centres)
    assert 0 not in labels.unique().tolist()
    _assert_nearest(points, centres[:, 1:], labels - 1)


def test_a_point_that_is_a_centre_gets_it() -> None:
    points = normal(5, 2, 90, 64)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    labels = _nearest(points, points[:, order])
    assert torch.equal(order[labels], torch.arange(90).expand(2, -1))


@pytest.mark.parametrize("tiles", [Tiles(16, 16, 1, 1), Tiles(64, 32, 4, 2), Tiles(128, 64, 4, 3)], ids=str)
def test_every_block_shape_finds_the_same(tiles: Tiles) -> None:
    points, centres = normal(1, 3, 100, 24), normal(2, 3, 70, 24)
    assert torch.equal(_nearest(points, centres, tiles), _nearest(points, centres, Tiles(64, 64, 4, 1)))


@pytest.mark.thinned
@dims
@dtypes
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_means_are_those_of_the_members(dtype: torch.dtype, D: int, weighted: bool) -> None:
    """Clusters of no point, of few, and of more points than a program's tile; rows with gaps between them."""
    points = normal(D, 2, 150, D + 3).to(dtype).to(DEVICE)[..., :D]
    labels = (torch.arange(150) % 7).minimum(torch.tensor(4)).repeat(2, 1)
    labels[1, :100] = 6
    # So small that a whole cluster's are below 1.
    weights = 1e-3 * torch.rand(2, 150, generator=torch.Generator().manual_seed(0)) if weighted else None
    means, totals = cluster_means_triton(points, labels.to(DEVICE), 9, None if weights is None else weights.to(DEVICE))
    members = torch.nn.functional.one_hot(labels, 9).double() * (1 if weights is None else weights[..., None].double())
    assert_close(totals.cpu(), members.sum(1), 1e-6)
    sums = members.transpose(1, 2) @ points.cpu().double()
    assert_close(means.cpu(), sums / members.sum(1).clamp(min=1e-30)[..., None], 1e-6)
    assert not means[totals == 0].any()


@properties
@given(seed=seeds, count=st.integers(1, 80), clusters=st.integers(1, 12))
def test_means_agree_with_plain_torch(seed: int, count: int, clusters: int) -> None:
    points, generator = normal(seed, 2, count, 5), torch.Generator().manual_seed(seed)
    labels = torch.randint(clusters, (2, count), generator=generator)
    weights = torch.rand(2, count, generator=generator) * (torch.rand(2, count, generator=generator) > 0.3)
    expected = cluster_means.reference(points, labels, clusters, weights)
    found = cluster_means_triton(points.to(DEVICE), labels.to(DEVICE), clusters, weights.to(DEVICE))
    for actual, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.cpu(), plain, rtol=1e-5, atol=1e-6)
