"""Appends tokens to a block of clusters on a GPU by replaying one CUDA graph, which all layers of a model share.

In a step all layers append the same number of tokens to the same number of clusters, so one graph fits them all.
Measured without a graph, launching the kernels took six times as long as computing.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from sparsekv.kernels.kmeans.online import join_in_order, join_tokens, sampling_order
from sparsekv.runtime.cache.graphs import captured


@dataclass(frozen=True)
class _Shape:
    """A graph's cache key: heads, tokens, channels, old tokens, clusters before and after, device."""

    heads: int
    tokens: int
    dims: int
    old: int
    clusters: int
    all_clusters: int
    device: torch.device


@dataclass(frozen=True)
class _Recorded:
    """A graph, its input buffers (points, old labels, order of the new tokens), and the labels that it writes."""

    graph: torch.cuda.CUDAGraph
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    labels: torch.Tensor


@torch.inference_mode()
def join_by_graph(
    points: torch.Tensor, labels: torch.Tensor, clusters: int, all_clusters: int, generator: torch.Generator
) -> torch.Tensor:
    """`join_tokens` on a GPU, replayed from a CUDA graph that is recorded at the first call with new shapes.

    The graph keeps buffers for its arguments and intermediate results, among them the points in float16 and the
    centres. Only the graph of the last shapes is kept.
    """
    (heads, tokens, dims), old = points.shape, labels.shape[1]
    recorded = _recorded(_Shape(heads, tokens, dims, old, clusters, all_clusters, points.device))
    if recorded is None:
        return join_tokens(points, labels, clusters, all_clusters, generator)
    given = points, labels, sampling_order(points, labels, generator)
    for held, tensor in zip(recorded.given, given, strict=True):
        held.copy_(tensor)
    recorded.graph.replay()
    return recorded.labels.clone()


@lru_cache(maxsize=1)
def _recorded(shape: _Shape) -> _Recorded | None:
    """The graph for a shape; None where it cannot be captured."""
    heads, device = shape.heads, shape.device
    points = torch.zeros(heads, shape.tokens, shape.dims, device=device)
    labels = torch.zeros(heads, shape.old, dtype=torch.int64, device=device)
    order = torch.arange(shape.tokens - shape.old, device=device).repeat(heads, 1)
    with torch.cuda.device(device):
        found = captured(lambda: join_in_order(points, labels, shape.clusters, shape.all_clusters, order), device)
    return None if found is None else _Recorded(found[0], (points, labels, order), found[1])
