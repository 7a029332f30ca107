"""Multipole Attention, offline (arXiv 2506.13059): clusters with value centroids, block by block, section 3.

The blocks let new tokens join without clustering the old ones again: only the last block, between alpha = W / 2 and
W + alpha tokens long, ever changes. RetroInfer (arXiv 2505.02922) clusters in segments, and estimates attention from
centroids, too.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.cluster_indexer import ClusterIndexer
from sparsekv.indexing.methods import LayerInput, register
from sparsekv.kernels.blocks import block_offsets
from sparsekv.kernels.hierarchy import join_blocks


@register("multipole")
@dataclass(frozen=True)
class MultipoleIndexer(ClusterIndexer):
    """Clusters of the keys of each block; one centroid per 16 tokens, or `--levels 0.125,0.015625` for two levels."""

    levels: tuple[float, ...] = field(
        default=(0.0625,), metadata={"help": ClusterIndexer.__dataclass_fields__["levels"].metadata["help"]}
    )
    block: int = field(default=8192, metadata={"help": "Tokens that are clustered together."})
    smallest_block: ClassVar[int] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < self.smallest_block:
            raise UsageError(f"--block {self.block}: give at least {self.smallest_block}")

    def build_layer(self, layer: LayerInput) -> dict[str, torch.Tensor]:
        """Levels of each block, numbered on; and block_offsets [blocks + 1] int32, counted from the first middle token.

        Allocates a block's keys once more in float32.
        """
        offsets = block_offsets(layer.keys.shape[1], self.block)
        blocks = [
            self.cluster(layer.keys[:, start:stop], layer.values[:, start:stop], layer.split.sinks + start)
            for start, stop in pairwise(offsets)
        ]
        return join_blocks(blocks) | {"block_offsets": torch.tensor(offsets, dtype=torch.int32)}
