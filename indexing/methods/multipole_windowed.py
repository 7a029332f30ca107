"""Multipole Attention with windowed RoPE, offline (arXiv 2506.13059, section 3.1, after A2ATS, arXiv 2502.12665).

Keys are clustered with their rotation undone, so that what a key says is not hidden by where it stands. Clusters keep a
centroid of those beside the one of the keys as attended: the replacement is in one softmax with keys as attended.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.indexers.interface import LayerInput
from sparsekv.indexing.indexers.registry import indexers
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.kernels.common.rotation import rotate


@indexers.register("multipole-windowed")
@dataclass(frozen=True)
class WindowedMultipoleIndexer(MultipoleIndexer):
    """Clusters, in blocks, of the keys with RoPE undone; a report shows whether that is any better on a model."""

    by_default: ClassVar[bool] = False

    def lookup_keys(self, layer: LayerInput, tokens: slice) -> torch.Tensor:
        """Keys [Hk, T, D] float32 as they would be at position 0.

        Raises:
            UsageError: it is not known how the layer turns its keys.
        """
        rope, keys = layer.facts.rope, layer.keys[:, tokens]
        if rope is None:
            raise UsageError(
                "windowed RoPE needs to know how each layer turns its keys, and this index does not say it: build it "
                "again with --force or, where the model turns them in a way of its own, leave the method out"
            )
        first = layer.split.sinks + tokens.start
        positions = torch.arange(first, first + keys.shape[1], device=keys.device)
        return rotate(keys, -positions, torch.tensor(rope.frequencies, device=keys.device), rope.interleaved)
