"""Tokens appended to a clustered block: their clusters, and the levels above."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import clustered, normal
from support.reference import assert_close

from sparsekv.kernels.kmeans.hierarchy import join_tokens, online_levels
from sparsekv.kernels.kmeans.kmeans import cluster_means, random_kmeans


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _spread(points: torch.Tensor, labels: torch.Tensor, clusters: int) -> float:
    """Mean squared distance of points [Hk, T, D] from the mean of their cluster."""
    means, _ = cluster_means(points, labels, clusters)
    return float((points - means.gather(1, labels[..., None].expand_as(points))).square().sum(-1).mean())


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    old=st.integers(4, 60),
    new=st.integers(1, 20),
    clusters=st.integers(1, 4),
    more=st.integers(0, 6),
)
def test_every_token_gets_one_of_the_clusters_and_a_seed_decides_which(
    seed: int, old: int, new: int, clusters: int, more: int
) -> None:
    points = normal(seed, 2, old + new, 5)
    labels = random_kmeans(points[:, :old], clusters, 3, _seeded())
    joined, again = (join_tokens(points, labels, clusters, clusters + more, _seeded(seed)) for _ in range(2))
    assert joined.shape == (2, old + new)
    assert int(joined.min()) >= 0
    assert int(joined.max()) < clusters + more
    assert torch.equal(joined, again)


def test_another_seed_samples_other_tokens() -> None:
    points = normal(0, 2, 300, 8)
    labels = random_kmeans(points[:, :200], 10, 3, _seeded())
    assert not torch.equal(*(join_tokens(points, labels, 10, 20, _seeded(seed)) for seed in (0, 1)))


def test_tokens_unlike_all_others_get_clusters_of_their_own() -> None:
    points = normal(0, 2, 60, 8)
    points[:, 40:] += 100
    labels = random_kmeans(points[:, :40], 4, 5, _seeded())
    joined = join_tokens(points, labels, 4, 5, _seeded())
    for of_head in joined:
        assert not set(of_head[:40].tolist()) & set(of_head[40:].tolist())


def test_tokens_like_those_of_a_cluster_join_it_when_there_are_no_more_clusters() -> None:
    centres = 50 * torch.eye(4).repeat(2, 1, 1)
    group = torch.arange(48) % 4
    points = centres[:, group] + normal(0, 2, 48, 4)
    joined = join_tokens(points, group[:40].repeat(2, 1), 4, 4, _seeded())
    assert torch.equal(joined, group.repeat(2, 1))


def test_a_cluster_that_holds_nothing_is_filled_by_new_tokens() -> None:
    """All old tokens are in cluster 2 of four, and no cluster is added."""
    points = torch.cat([normal(0, 1, 30, 6), 100 + 50 * normal(1, 1, 12, 6)], 1)
    joined = join_tokens(points, torch.full((1, 30), 2), 4, 4, _seeded())
    assert set(joined[0, :30].tolist()) == {2}
    assert len(set(joined[0, 30:].tolist()) - {2}) == 3


def test_joining_many_times_stays_as_tight_as_clustering_once() -> None:
    points = clustered(0, 2, 800, 16, 200)
    labels = random_kmeans(points[:, :400], 25, 10, _seeded())
    for tokens in range(440, 801, 40):
        labels = join_tokens(points[:, :tokens], labels, (tokens - 40) // 16, tokens // 16, _seeded(tokens))
    anew = random_kmeans(points, 50, 10, _seeded())
    assert _spread(points, labels, 50) < 1.1 * _spread(points, anew, 50)


@pytest.mark.gpu
def test_one_graph_records_joining_and_repeats_it() -> None:
    """The joining has no synchronisation, and no shape in it depends on the tokens."""
    points = clustered(0, 2, 400, 64, 30).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    labels = random_kmeans(points[:, :380], 20, 3, generator)
    expected = [join_tokens(points, labels, 20, 22, generator.manual_seed(seed)) for seed in (1, 2)]
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        joined = join_tokens(points, labels, 20, 22, generator)
    for seed, labels_then in zip((1, 2), expected, strict=True):
        joined.fill_(-1)
        generator.manual_seed(seed)
        graph.replay()
        assert torch.equal(joined, labels_then)


@pytest.mark.parametrize("space", ["normalised", "raw", "centred"])
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 90))
def test_coarse_levels_are_means_of_their_tokens(space: str, seed: int, tokens: int) -> None:
    keys, shares = normal(seed, 2, tokens, 4), (0.3, 0.1, 0.03)
    finest = max(1, round(shares[0] * tokens))
    labels = torch.randint(finest, (2, tokens), generator=_seeded(seed))
    levels = online_levels(keys, labels, finest, shares, space, 3, _seeded(seed))
    assert len(levels) == len(shares)
    for level in levels:
        members = torch.nn.functional.one_hot(labels, level.counts.shape[1]).double()
        assert torch.equal(level.counts.double(), members.sum(1))
        sums = torch.einsum("htc,htd->hcd", members, keys.double())
        assert_close(level.centroids * level.counts[..., None], sums, 1e-5)
        labels = labels if level.parent is None else level.parent.gather(1, labels)
