"""Tokens join a block on a GPU: what is replayed is what is launched."""

import pytest
import torch
from support.random_tensors import clustered

from sparsekv.kernels.kmeans.hierarchy import join_tokens
from sparsekv.kernels.kmeans.kmeans import random_kmeans
from sparsekv.runtime.selection.clusters.stream import join_by_graph

pytestmark = pytest.mark.gpu


def _block(seed: int, heads: int, old: int, clusters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points [heads, old + 20, 64], and labels of the old ones."""
    points = clustered(seed, heads, old + 20, 64, 30).cuda()
    return points, random_kmeans(points[:, :old], clusters, 3, torch.Generator("cuda").manual_seed(seed))


def test_layers_and_shapes_in_turn_get_the_labels_that_launches_give() -> None:
    for seed, (heads, old, clusters, more) in enumerate(
        [(2, 380, 20, 2), (2, 380, 20, 2), (2, 400, 22, 0), (3, 90, 5, 4)]
    ):
        points, labels = _block(seed, heads, old, clusters)
        found, expected = (
            join(points, labels, clusters, clusters + more, torch.Generator("cuda").manual_seed(seed))
            for join in (join_by_graph, join_tokens)
        )
        assert torch.equal(found, expected)


def test_labels_stay_when_the_next_layer_joins() -> None:
    blocks = [_block(seed, 2, 300, 12) for seed in range(2)]
    generator = torch.Generator("cuda").manual_seed(0)
    first, second = (join_by_graph(*block, 12, 14, generator) for block in blocks)
    assert not torch.equal(first, second)
    assert torch.equal(first, join_tokens(*blocks[0], 12, 14, generator.manual_seed(0)))
