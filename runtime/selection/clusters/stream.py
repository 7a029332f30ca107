"""Appending new tokens to a layer's clusters during decoding (Multipole Attention, section 3.3)."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Self

import torch

from sparsekv.kernels.clusters.cluster_choice import logs_and_shares, tree_from_tensors
from sparsekv.kernels.kmeans.hierarchy import (
    REFINEMENTS,
    block_offsets,
    finest_size,
    join_blocks,
    join_in_order,
    join_tokens,
    level_sizes,
    level_tensors,
    number_neighbours,
    online_levels,
    sampling_order,
    single_out,
)
from sparsekv.kernels.kmeans.kmeans import random_kmeans, to_space
from sparsekv.runtime.cache.buffers import GrowingRows, captured
from sparsekv.runtime.selection.clusters.steps import WindowedRope
from sparsekv.runtime.selection.interface import Appended


@torch.inference_mode()
def join_by_graph(
    points: torch.Tensor, labels: torch.Tensor, clusters: int, all_clusters: int, generator: torch.Generator
) -> torch.Tensor:
    """Run `join_tokens` on a GPU by replaying a CUDA graph, which is captured at the first call with new shapes.

    The graph refers to buffers for its arguments and intermediate results, such as the points in float16 and the
    centroids. Only the graph of the most recent shapes, with its buffers, stays in memory.

    Args:
        points, labels, clusters, all_clusters, generator: as for `join_tokens`.
    """
    (heads, tokens, dims), old = points.shape, labels.shape[1]
    recorded = _recorded(heads, tokens, dims, old, clusters, all_clusters, points.device)
    if recorded is None:
        return join_tokens(points, labels, clusters, all_clusters, generator)
    graph, inputs, joined = recorded
    for held, tensor in zip(inputs, (points, labels, sampling_order(points, labels, generator)), strict=True):
        held.copy_(tensor)
    graph.replay()
    return joined.clone()


@lru_cache(maxsize=1)
def _recorded(
    heads: int, tokens: int, dims: int, old: int, clusters: int, all_clusters: int, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...], torch.Tensor] | None:
    """Capture the CUDA graph of `join_in_order` for a shape; None if it cannot be captured.

    Returns the graph, its input buffers (points, old labels, order of the new tokens), and the buffer of the labels
    that it computes.
    """
    points = torch.zeros(heads, tokens, dims, device=device)
    labels = torch.zeros(heads, old, dtype=torch.int64, device=device)
    order = torch.arange(tokens - old, device=device).repeat(heads, 1)
    with torch.cuda.device(device):
        found = captured(lambda: join_in_order(points, labels, clusters, all_clusters, order), device)
    return None if found is None else (found[0], (points, labels, order), found[1])


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class BlockClustering:
    """Clustering parameters of the indexer, with which new tokens are clustered, too."""

    levels: tuple[float, ...]
    outliers: float
    block: int
    space: str
    iterations: int
    seed: int

    @classmethod
    def from_parameters(cls, parameters: dict[str, Any]) -> Self:
        """Read the clustering parameters from the indexer's parameters in a manifest."""
        names = ("block", "space", "iterations", "seed")
        outliers = parameters.get("outliers", 0.0)  # an older index lacks this parameter
        return cls(tuple(parameters["levels"]), outliers, **{name: parameters[name] for name in names})

    def anew(self, keys: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, int]:
        """Cluster a block's keys [Hk, T, D] from scratch; return their labels [Hk, T] and the number of clusters."""
        clusters = level_sizes(self.levels, keys.shape[1])[0]
        labels = random_kmeans(to_space(keys, self.space), clusters, self.iterations, generator)
        return single_out(keys, labels, clusters, self.outliers)

    def joined(
        self, keys: torch.Tensor, labels: torch.Tensor, clusters: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, int]:
        """Add new keys to a block's clusters; return the labels [Hk, T] of all keys and the new number of clusters.

        Args:
            keys: [Hk, T, D], keys of the block, the old keys first.
            labels: [Hk, T_old], labels of the old keys.
            clusters: number of old clusters.
        """
        wanted = max(clusters, finest_size(self.levels, self.outliers, keys.shape[1]))
        join = join_by_graph if keys.is_cuda else join_tokens
        return join(to_space(keys, self.space), labels, clusters, wanted, generator), wanted

    def tensors(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        labels: torch.Tensor,
        clusters: int,
        first: int,
        generator: torch.Generator,
        attended: torch.Tensor | None = None,
    ) -> Tensors:
        """Compute the artifact's tensors for a block from the labels of its keys.

        Args:
            keys, values: [Hk, T, D].
            labels: [Hk, T], finest cluster of each key.
            clusters: number of finest clusters.
            first: position of the block's first token.
            attended: [Hk, T, D], the keys with RoPE, if RoPE is undone in `keys` (windowed RoPE).
        """
        levels = online_levels(keys, labels, clusters, self.levels, self.space, self.iterations, generator)
        return level_tensors(levels, number_neighbours(levels, labels), values, first, attended)


def lookup_tensors(tensors: Tensors, first_row: int = 0, first_clusters: list[int] | None = None) -> Tensors:
    """Compute the tensors that a lookup of clusters reads, from the artifact's tensors of consecutive blocks.

    Args:
        tensors: the artifact's tensors of these blocks.
        first_row: number of rows before these blocks.
        first_clusters: number of clusters of each level before these blocks.

    Returns:
        token_order: [Hk, M] int64.
        starts: [Hk, C_0] int64, the first row of each finest cluster.
        first_row: `starts` in int32, for kernels.
        levelI.centroids, levelI.counts, levelI.value_centroids: unchanged.
        level0.log_counts, level0.shares: the `logs_and_shares` of the counts.
        levelI.parent: [Hk, C_I] int64, for all levels except the coarsest.
        levelI.first_child, levelI.children: [Hk, C_I] int64, for all levels except the finest: the first child, and the
            number of non-empty children.
    """
    tree = tree_from_tensors(tensors)
    first = first_clusters or [0] * len(tree.centroids)
    found = {name: tensor for name, tensor in tensors.items() if name.startswith("level")}
    found["token_order"] = tensors["token_order"].long()
    found["starts"] = tensors["token_offsets"][:, :-1].long() + first_row
    found["first_row"] = found["starts"].int()
    found["level0.log_counts"], found["level0.shares"] = logs_and_shares(tree.counts[0])
    for level, first_child in enumerate(tree.first_child):
        parent = tensors[f"level{level}.parent"].long()
        filled = (tree.counts[level] > 0).long()
        found[f"level{level}.parent"] = parent + first[level + 1]
        found[f"level{level + 1}.first_child"] = first_child + first[level]
        found[f"level{level + 1}.children"] = torch.zeros_like(first_child).scatter_add_(1, parent, filled)
    return found


@dataclass
class _Open:
    """Start of the open block, to which tokens are appended: its first row, and its first cluster of each level."""

    row: int
    clusters: list[int]

    def start(self, name: str) -> int:
        """Return the index, in a tensor of `lookup_tensors`, of the first entry of the block that takes new tokens."""
        if name == "token_order":
            return self.row
        return self.clusters[int(name.partition(".")[0].removeprefix("level")) if name.startswith("level") else 0]


class ClusterStream:
    """A layer's clusters, with an open last block to which tokens can be appended.

    Args:
        tensors: the artifact's tensors, with block_offsets and block_clusters. Token positions are counted from the
            first token after the sinks.
        windowed_rope: undoes RoPE before keys are clustered; None: keys are clustered with RoPE.
    """

    def __init__(self, tensors: Tensors, clustering: BlockClustering, windowed_rope: WindowedRope | None = None):
        self.clustering, self.windowed_rope = clustering, windowed_rope
        found = lookup_tensors(tensors)
        self.rows = {name: GrowingRows(tensor) for name, tensor in found.items()}
        clusters = [int(tensors["block_clusters"][0, -2])]
        while f"level{len(clusters) - 1}.parent" in found:
            # Clusters are numbered by parent, and so a block's first cluster is a child of the block's first coarse
            # cluster.
            clusters.append(int(found[f"level{len(clusters) - 1}.parent"][0, clusters[-1]]))
        self.open = self.stored_open = _Open(int(tensors["block_offsets"][-2]), clusters)
        self.stored: Tensors = {}

    def found(self) -> Tensors:
        """Return views of the current tensors for a lookup."""
        return {name: rows.rows for name, rows in self.rows.items()}

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> Appended:
        """Append new tokens to the open block's clusters.

        If the block becomes too long, it is split into closed blocks and a new open block. All of these blocks are
        clustered from scratch.

        Args:
            keys, values: [Hk, T, D], the open block's rows in layout order, then the new rows.
        """
        if not self.stored:
            self.stored = {name: rows.rows[:, self.open.start(name) :].clone() for name, rows in self.rows.items()}
        first, tokens = self.open.row, keys.shape[1]
        places = self._places(tokens)
        attended, values = (rows.gather(1, places[..., None].expand_as(rows)) for rows in (keys, values))
        keys = attended if self.windowed_rope is None else self.windowed_rope.undo(attended, first)
        # The seed depends only on the number of tokens, so that a rewound cache gets the same clusters for the same
        # tokens.
        generator = torch.Generator(keys.device).manual_seed(self.clustering.seed + first + tokens)
        cuts = [cut - first for cut in block_offsets(first + tokens, self.clustering.block) if cut >= first]
        if len(cuts) == 2:
            labels = [self.clustering.joined(keys, *self._labels(places), generator)]
        else:
            labels = [self.clustering.anew(keys[:, start:stop], generator) for start, stop in pairwise(cuts)]
        blocks = []
        for (start, stop), of_block in zip(pairwise(cuts), labels, strict=True):
            in_softmax = None if self.windowed_rope is None else attended[:, start:stop]
            of_keys, of_values = keys[:, start:stop], values[:, start:stop]
            blocks.append(self.clustering.tensors(of_keys, of_values, *of_block, first + start, generator, in_softmax))
        found = lookup_tensors(join_blocks(blocks), first, self.open.clusters)
        for name, rows in found.items():
            self.rows[name].write(self.open.start(name), rows)
        passes = 1 + (REFINEMENTS if len(cuts) == 2 else self.clustering.iterations)
        self._close(blocks[:-1], cuts[-2])
        return Appended(places.gather(1, found["token_order"] - first), float(passes * tokens))

    def remove_appended(self) -> torch.Tensor | None:
        """Restore the stored clusters.

        Returns the stored order [Hk, T] of the last block's rows, as indices into the block's rows before the call.
        Returns None if nothing was appended.
        """
        if not self.stored:
            return None
        self.open = self.stored_open
        places = self._places(self.rows["token_order"].used - self.open.row)
        for name, tensor in self.stored.items():
            self.rows[name].write(self.open.start(name), tensor)
        order = places.gather(1, self.stored["token_order"] - self.open.row)
        self.stored = {}
        return order

    def _places(self, tokens: int) -> torch.Tensor:
        """Return the row [Hk, tokens] of each token of the open block, counted from the block's first row.

        New tokens have the last rows, in order.
        """
        positions = self.rows["token_order"].rows[:, self.open.row :] - self.open.row
        new = torch.arange(positions.shape[1], tokens, device=positions.device)
        return torch.cat([positions.argsort(1), new.expand(len(positions), -1)], 1)

    def _labels(self, places: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the finest cluster [Hk, T_old] of each token in the open block, and the number of finest clusters.

        Clusters are counted from the block's first cluster.
        """
        counts = self.rows["level0.counts"].rows[:, self.open.clusters[0] :]
        ends = counts.long().cumsum(1)
        old = self.rows["token_order"].used - self.open.row
        labels = torch.searchsorted(ends, places[:, :old].contiguous(), right=True)
        return labels, counts.shape[1]

    def _close(self, closed: list[Tensors], rows: int) -> None:
        clusters = [
            first + sum(block[f"level{level}.counts"].shape[1] for block in closed)
            for level, first in enumerate(self.open.clusters)
        ]
        self.open = _Open(self.open.row + rows, clusters)
