"""Descriptions of what the methods of an index built, layer by layer, to show to the user."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsekv.formats.reader import CPU, Artifact
from sparsekv.runtime.cache.layer_rows import LayerRows
from sparsekv.runtime.decoding.prepare import stored_context
from sparsekv.runtime.reporting.queries import tail_block
from sparsekv.runtime.selection.capabilities import DescribesClusters, DescribesLists
from sparsekv.runtime.selection.cluster_statistics import Clustering
from sparsekv.runtime.selection.list_statistics import ListShape
from sparsekv.runtime.selection.registry import methods


@dataclass(frozen=True)
class LayerDescription:
    """One layer of one method: statistics of its clusters and posting lists; None where it has none."""

    layer: int
    clusters: Clustering | None
    lists: ListShape | None


def describe_layers(
    artifact: Artifact, name: str, biggest: int, device: torch.device = CPU
) -> Iterator[LayerDescription]:
    """Descriptions of each indexed layer for the method called `name`, made on a device.

    Reads the whole context and the method's tensors, one layer at a time.

    Args:
        biggest: how many of the biggest clusters to list.
    """
    method = methods()[name]
    for layer in artifact.manifest.indexed_layers:
        rows = LayerRows(artifact, layer)
        context, middle = stored_context(rows, name, device).context, rows.middle_values(device)
        queries = tail_block(artifact, layer).queries.unflatten(0, (len(middle), -1)).to(device)
        clusters = method.describe_clusters(context, middle, biggest) if issubclass(method, DescribesClusters) else None
        lists = method.describe_lists(context, queries) if issubclass(method, DescribesLists) else None
        yield LayerDescription(layer, clusters, lists)
