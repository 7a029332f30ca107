"""Clusters of one outlier each: those farthest from their centroid, and nothing else changes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import member_means
from support.random_tensors import normal

from sparsekv.kernels.kmeans.hierarchy import finest_size, single_out


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 80), clusters=st.integers(1, 12), share=st.floats(0.0, 1.0))
def test_those_farthest_from_their_centroid_become_clusters_of_their_own(
    seed: int, tokens: int, clusters: int, share: float
) -> None:
    points = normal(seed, 3, tokens, 8)
    labels = torch.randint(clusters, (3, tokens), generator=torch.Generator().manual_seed(seed))
    found, size = single_out(points, labels, clusters, share)
    singled = found >= clusters
    assert size == clusters + round(share * tokens)
    assert size == finest_size((clusters / tokens,), share, tokens)
    for head in range(3):
        assert sorted(found[head, singled[head]].tolist()) == list(range(clusters, size))
    assert torch.equal(found[~singled], labels[~singled])
    away = (points.double() - member_means(points, labels)).norm(dim=-1)
    nearest = away.masked_fill(~singled, torch.inf).amin(1)
    farthest = away.masked_fill(singled, 0).amax(1)
    assert bool((farthest <= nearest + 1e-5).all())
