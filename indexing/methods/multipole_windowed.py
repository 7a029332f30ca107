"""Indexer of Multipole Attention with windowed RoPE (arXiv 2506.13059, section 3.1, after A2ATS, arXiv 2502.12665).

Keys are clustered with RoPE undone, so that clusters do not depend on position. Each cluster stores two key centroids.
The centroid of the keys with RoPE undone is used for lookup. The centroid of the keys with RoPE is attended to, because
the centroids of unselected clusters are in one softmax with exact keys.
"""

from dataclasses import dataclass

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import RopeFacts
from sparsekv.indexing.indexers.interface import LayerInput, indexers
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.kernels.common.runs import rotate


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
