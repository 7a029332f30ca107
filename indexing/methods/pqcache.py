"""Indexer of PQCache (arXiv 2407.12820): product quantisation of the middle keys, with one byte per subspace.

For each KV head, the channels are split into `--pq-bytes` subspaces. The keys of each subspace are clustered separately
by k-means. Each byte of a key's code is the index of the nearest centroid in a subspace. A subspace has 256 centroids,
or one for each key if there are fewer keys.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from sparsekv.formats.errors import check_at_least_one
from sparsekv.indexing.indexers.interface import Indexer, LayerInput, Tensors, check_iterations, indexers
from sparsekv.indexing.indexers.product_codes import CODES, check_parts, encode, train_codebooks


@indexers.register("pqcache")
@dataclass(frozen=True)
class PQCacheIndexer(Indexer):
    """Builds PQ codebooks and the codes of the keys of all tokens between sinks and tail."""

    learns: ClassVar[bool] = True
    takes_tokens: ClassVar[bool] = True
    pq_bytes: int = field(default=8, metadata={"help": "Bytes of a key's code, a divisor of the head's channels."})
    iterations: int = field(default=10, metadata={"help": "Iterations of k-means."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_iterations(self.iterations)
        check_at_least_one(self, "pq_bytes")

    def check_channels(self, head_dim: int) -> None:
        check_parts("--pq-bytes", self.pq_bytes, head_dim)

    def build_layer(self, layer: LayerInput) -> Tensors:
        """Build codebooks [Hk, m, C, D / m] float16, and codes [Hk, M, m] uint8, the nearest of the float16 centroids.

        Allocates the keys up to three times in float32.
        """
        codebooks = train_codebooks(layer.keys, self.pq_bytes, self.iterations, self.seed)
        return {"codebooks": codebooks, "codes": encode(layer.keys, codebooks)}

    def append_layer(self, tensors: Tensors, layer: LayerInput, old_middle: int) -> Tensors:
        """Keep the codebooks, and encode the new keys with them.

        Codebooks that were trained on fewer than 256 keys are trained again, because they distinguish few keys.
        """
        if tensors["codebooks"].shape[2] < min(CODES, layer.keys.shape[1]):
            return self.build_layer(layer)
        new = encode(layer.keys[:, old_middle:], tensors["codebooks"])
        return {"codebooks": tensors["codebooks"], "codes": torch.cat([tensors["codes"], new], 1)}
