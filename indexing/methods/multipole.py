"""Indexer of Multipole Attention (arXiv 2506.13059, section 3): blockwise clusters with key and value centroids.

Blocks of W tokens are clustered separately, so that an append changes only the last block. This block has at least
alpha = W / 2 tokens, unless the document has fewer. It is split when it reaches W + alpha tokens. RetroInfer (arXiv
2505.02922) also clusters in segments and estimates attention from centroids.

With windowed RoPE (section 3.1, after A2ATS, arXiv 2502.12665) keys are clustered with RoPE undone, so that clusters do
not depend on position. Each cluster then stores two key centroids: one with RoPE undone, for lookup, and one with RoPE,
which queries attend to.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import RopeFacts
from sparsekv.indexing.indexers.cluster_indexer import ClusterIndexer, finest_labels, split_blocks
from sparsekv.indexing.indexers.interface import LayerInput, Tensors, indexers
from sparsekv.kernels.common.row_operations import rotate
from sparsekv.kernels.kmeans.hierarchy import (
    block_offsets,
    equal_neighbours,
    finest_size,
    join_blocks,
    join_tokens,
    level_sizes,
    level_tensors,
    number_neighbours,
    online_levels,
)
from sparsekv.kernels.kmeans.kmeans import to_space

STEP = 128  # largest number of tokens that are appended to a block at once
AT_ONCE = 16  # blocks that a GPU clusters together, because launches dominate the time of one block
MOST_TOKENS = 1 << 17  # largest number of tokens of all blocks that are clustered together
MOST_JOINS = 2  # more steps of STEP tokens would cost more than clustering the block from scratch


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < self.smallest_block:
            raise UsageError(f"--block {self.block}: give at least {self.smallest_block}")

    def build_layer(self, layer: LayerInput) -> Tensors:
        """Build the joined levels of all blocks, and block_offsets [blocks + 1] int32, which count indexed tokens.

        Allocates one block's keys twice in float32. On a GPU, up to `AT_ONCE` blocks are clustered together. Then the
        keys of all these blocks are allocated twice in float32, and their keys and values are copied.
        """
        return self._join(layer, [], block_offsets(layer.keys.shape[1], self.block))

    def append_layer(self, tensors: Tensors, layer: LayerInput, old_middle: int) -> Tensors:
        """Keep all blocks but the last, and append up to MOST_JOINS * STEP tokens to the clusters of the last block.

        With more tokens, or if the last block is split, the block's tokens are clustered from scratch, which then takes
        less time and gives better clusters. Allocates the same as `build_layer`.
        """
        offsets = block_offsets(layer.keys.shape[1], self.block)
        blocks = split_blocks(tensors)
        opened = blocks.pop()
        stays_open = len(offsets) == len(blocks) + 2
        if stays_open and layer.keys.shape[1] - old_middle <= MOST_JOINS * STEP:
            blocks.append(self._extend(opened, layer, slice(offsets[-2], offsets[-1]), old_middle - offsets[-2]))
        return self._join(layer, blocks, offsets)

    def _join(self, layer: LayerInput, blocks: list[Tensors], offsets: list[int]) -> Tensors:
        """Cluster the blocks that follow `blocks`, and join all blocks.

        `offsets` are the first tokens of all blocks, followed by the end of the last block.
        """
        runs = equal_neighbours(offsets[len(blocks) :], self._together(layer.keys))
        made = [block for run in runs for block in self._cluster_blocks(layer, run)]
        return join_blocks(blocks + made) | {"block_offsets": torch.tensor(offsets, dtype=torch.int32)}

    def _together(self, keys: torch.Tensor) -> int:
        """Return the maximum number of tokens of blocks that are clustered together; on a CPU, one block's tokens."""
        return min(AT_ONCE * self.block, MOST_TOKENS) if keys.is_cuda else self.block

    def _cluster_blocks(self, layer: LayerInput, offsets: list[int]) -> Iterator[Tensors]:
        """Cluster neighbouring blocks of equal length together, with each head of each block as a separate head."""
        tokens, shape = slice(offsets[0], offsets[-1]), (len(layer.keys), len(offsets) - 1)
        looked_up = self.lookup_keys(layer, tokens)
        keys, values, lookup = (
            None if rows is None else rows.unflatten(1, (shape[1], -1)).flatten(0, 1)
            for rows in (layer.keys[:, tokens], layer.values[:, tokens], looked_up)
        )
        assert keys is not None
        assert values is not None
        found = self.cluster(keys, values, layer.split.sinks, lookup)
        wanted = list(enumerate(level_sizes(self.levels, keys.shape[1])))[1:]
        if shape[1] > 1 and any(found[f"level{level}.counts"].shape[1] < size for level, size in wanted):
            # A block with few distinct keys may have fewer clusters than other blocks. Then each block is clustered
            # alone.
            for start, stop in pairwise(offsets):
                yield from self._cluster_blocks(layer, [start, stop])
            return
        of_blocks = {name: tensor.unflatten(0, shape) for name, tensor in found.items()}
        for block, start in enumerate(offsets[:-1]):
            of_block = {name: tensor[:, block] for name, tensor in of_blocks.items()}
            yield of_block | {"token_order": of_block["token_order"] + start}

    def lookup_keys(self, layer: LayerInput, tokens: slice) -> torch.Tensor | None:
        """Return the keys [Hk, T, D] by which `tokens` are clustered and looked up; None for the attended keys."""
        return None

    def _extend(self, block: Tensors, layer: LayerInput, tokens: slice, old: int) -> Tensors:
        """Append a block's tokens from token `old` on to the block's clusters (section 3.3 of the paper)."""
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


@indexers.register("multipole-windowed")
@dataclass(frozen=True)
class WindowedMultipoleIndexer(MultipoleIndexer):
    """Clusters keys with RoPE undone, block by block.

    `recall-report` shows whether this is better than `multipole` for a model.
    """

    @property
    def needs_rope(self) -> bool:
        return True

    def check_rope(self, rope: RopeFacts | None) -> None:
        if rope is None:
            raise UsageError(
                "--method multipole-windowed: the model does not rotate its keys by RoPE frequencies, the only "
                "rotation that the method can undo; leave the method out"
            )

    def lookup_keys(self, layer: LayerInput, tokens: slice) -> torch.Tensor:
        """Return keys [Hk, T, D] float32 with RoPE undone, as they would be at position 0.

        Raises:
            UsageError: the layer's RoPE is not known.
        """
        rope, keys = layer.facts.rope, layer.keys[:, tokens]
        if rope is None:
            raise UsageError(
                "windowed RoPE needs to know how each layer rotates its keys, which this index does not record: build "
                "it again with --force, or leave the method out if the model does not rotate keys by RoPE frequencies"
            )
        first = layer.split.sinks + tokens.start
        positions = torch.arange(first, first + keys.shape[1], device=keys.device)
        return rotate(keys, -positions, torch.tensor(rope.frequencies, device=keys.device), rope.interleaved)
