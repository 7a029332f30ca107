"""Multipole Attention, offline (arXiv 2506.13059, section 3): blockwise clusters with key and value centroids.

Blocks make it possible to append tokens without clustering the old ones again: only the last block, between
alpha = W / 2 and W + alpha tokens long, ever changes. RetroInfer (arXiv 2505.02922) clusters in segments and estimates
attention from centroids, too.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.indexers.cluster_indexer import ClusterIndexer
from sparsekv.indexing.indexers.interface import LayerInput
from sparsekv.indexing.indexers.online_blocks import finest_labels, split_blocks
from sparsekv.indexing.indexers.registry import indexers
from sparsekv.kernels.kmeans.blocks import block_offsets
from sparsekv.kernels.kmeans.hierarchy import join_blocks, level_tensors, number_neighbours
from sparsekv.kernels.kmeans.kmeans import to_space
from sparsekv.kernels.kmeans.online import join_tokens, online_levels
from sparsekv.kernels.kmeans.outliers import finest_size

STEP = 128  # tokens appended to a block together, at most
MOST_JOINS = 2  # more than two such steps cost more than clustering the block from scratch


@indexers.register("multipole")
@dataclass(frozen=True)
class MultipoleIndexer(ClusterIndexer):
    """Clusters each block's keys: one centroid per 16 tokens, or two levels with `--levels 0.125,0.015625`."""

    levels: tuple[float, ...] = field(
        default=(0.0625,), metadata={"help": ClusterIndexer.__dataclass_fields__["levels"].metadata["help"]}
    )
    block: int = field(default=8192, metadata={"help": "Tokens per block; each block is clustered on its own."})
    smallest_block: ClassVar[int] = 16
    takes_tokens: ClassVar[bool] = True
    by_default: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < self.smallest_block:
            raise UsageError(f"--block {self.block}: give at least {self.smallest_block}")

    def build_layer(self, layer: LayerInput) -> dict[str, torch.Tensor]:
        """The levels of all blocks, joined, and block_offsets [blocks + 1] int32, counted from the first middle token.

        Allocates one block's keys once more in float32.
        """
        return self._join(layer, [], block_offsets(layer.keys.shape[1], self.block))

    def append_layer(
        self, tensors: dict[str, torch.Tensor], layer: LayerInput, old_middle: int
    ) -> dict[str, torch.Tensor]:
        """Keep closed blocks; append up to MOST_JOINS * STEP tokens to the clusters of the last block.

        With more tokens, or when the last block closes, its tokens are clustered from scratch, which then costs less
        and finds better clusters. Allocates the changed blocks' keys once more in float32.
        """
        offsets = block_offsets(layer.keys.shape[1], self.block)
        blocks = split_blocks(tensors)
        opened = blocks.pop()
        stays_open = len(offsets) == len(blocks) + 2
        if stays_open and layer.keys.shape[1] - old_middle <= MOST_JOINS * STEP:
            blocks.append(self._extend(opened, layer, slice(offsets[-2], offsets[-1]), old_middle - offsets[-2]))
        return self._join(layer, blocks, offsets)

    def _join(
        self, layer: LayerInput, blocks: list[dict[str, torch.Tensor]], offsets: list[int]
    ) -> dict[str, torch.Tensor]:
        """Cluster the blocks of `offsets` that `blocks` lacks, and join all of them."""
        made = [
            self._cluster_block(layer, slice(start, stop)) for start, stop in list(pairwise(offsets))[len(blocks) :]
        ]
        return join_blocks(blocks + made) | {"block_offsets": torch.tensor(offsets, dtype=torch.int32)}

    def _cluster_block(self, layer: LayerInput, tokens: slice) -> dict[str, torch.Tensor]:
        keys, values = layer.keys[:, tokens], layer.values[:, tokens]
        return self.cluster(keys, values, layer.split.sinks + tokens.start, self.lookup_keys(layer, tokens))

    def lookup_keys(self, layer: LayerInput, tokens: slice) -> torch.Tensor | None:
        """Keys [Hk, T, D] by which middle tokens are clustered and looked up; None: the keys as attended."""
        return None

    def _extend(
        self, block: dict[str, torch.Tensor], layer: LayerInput, tokens: slice, old: int
    ) -> dict[str, torch.Tensor]:
        """Append the tokens after the first `old` of a block to the block's clusters (section 3.3 of the paper)."""
        keys, values = layer.keys[:, tokens], layer.values[:, tokens]
        generator = torch.Generator(keys.device).manual_seed(self.seed)
        labels, clusters = finest_labels(block), block["level0.counts"].shape[1]
        lookup_keys = self.lookup_keys(layer, tokens)
        clustered, attended = (keys, None) if lookup_keys is None else (lookup_keys, keys)
        for end in [*range(old + STEP, keys.shape[1], STEP), keys.shape[1]]:
            points, before = to_space(clustered[:, :end], self.space), clusters
            clusters = finest_size(self.levels, self.outliers, end)
            labels = join_tokens(points, labels, before, clusters, generator)
        levels = online_levels(clustered, labels, clusters, self.levels, self.space, self.iterations, generator)
        numbers, first = number_neighbours(levels, labels), layer.split.sinks + tokens.start
        return level_tensors(levels, numbers, values, first, attended)
