"""What is told about an index's clusters, against counting them one by one."""

import numpy as np
import torch
from support.small_layer import small_layer

from sparsekv.runtime.clusters import describe_clusters
from sparsekv.runtime.oracle import Oracle
from sparsekv.runtime.squeezed import Squeezed


def test_sizes_of_each_level_are_those_of_the_clusters_that_hold_tokens() -> None:
    tensors = small_layer(repeated=120).context.tensors
    sizes = describe_clusters(tensors, 0).sizes
    assert [size.level for size in sizes] == [0, 1]
    assert sizes[0].empty > 0
    for size in sizes:
        counts = tensors[f"level{size.level}.counts"].flatten().tolist()
        filled = [count for count in counts if count]
        assert (size.clusters, size.empty) == (len(counts), len(counts) - len(filled))
        assert (size.min, size.max) == (min(filled), max(filled))
        assert (size.median, size.p99) == (np.quantile(filled, 0.5), np.quantile(filled, 0.99))


def test_biggest_clusters_come_first_with_their_tokens() -> None:
    layer = small_layer()
    tensors = layer.context.tensors
    described = Squeezed.describe(tensors, 5)
    assert torch.equal(described.counts, tensors["level0.counts"])
    sizes = [len(cluster.positions) for cluster in described.biggest]
    assert sizes == sorted(tensors["level0.counts"].flatten().tolist(), reverse=True)[:5]
    for cluster in described.biggest:
        start, stop = tensors["token_offsets"][cluster.kv_head, cluster.cluster :][:2].tolist()
        assert cluster.positions == sorted(tensors["token_order"][cluster.kv_head, start:stop].tolist())


def test_more_clusters_than_there_are_lists_all_and_a_method_without_them_none() -> None:
    tensors = small_layer(levels=(0.02,)).context.tensors
    assert len(describe_clusters(tensors, 1000).biggest) == 2 * 4
    assert Oracle.describe(tensors, 3) is None
