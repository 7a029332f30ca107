"""PQCache, offline (arXiv 2407.12820): product quantisation of the middle keys, one byte per subspace.

Per KV head the channels are split into `--pq-bytes` subspaces. Each is clustered on its own (on a CPU by faiss's
k-means, as faiss's product quantiser does), and a byte of a key's code is the number of the nearest centroid. A
subspace has 256 centroids, or as many as there are keys.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.indexers.clustering import kmeans
from sparsekv.indexing.indexers.interface import Indexer, LayerInput, check_iterations
from sparsekv.indexing.indexers.registry import indexers
from sparsekv.kernels.kmeans.kmeans import assign, cluster_means

CODES = 256  # centroids per subspace: the values of a byte


@indexers.register("pqcache")
@dataclass(frozen=True)
class PQCacheIndexer(Indexer):
    """Builds PQ codebooks and the codes of all middle keys."""

    by_default: ClassVar[bool] = False
    takes_tokens: ClassVar[bool] = True
    pq_bytes: int = field(default=8, metadata={"help": "Bytes per key's PQ code, a divisor of the head's channels."})
    iterations: int = field(default=10, metadata={"help": "Iterations of k-means."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_iterations(self.iterations)
        for name in ("pq_bytes",):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: give at least 1")

    def build_layer(self, layer: LayerInput) -> dict[str, torch.Tensor]:
        """codebooks [Hk, m, C, D / m] float16, and codes [Hk, M, m] uint8, the nearest centroids in that float16 form.

        Allocates the keys once more in float32.

        Raises:
            UsageError: the head's channels do not divide into `pq_bytes` subspaces.
        """
        head_dim = layer.keys.shape[2]
        if head_dim % self.pq_bytes:
            raise UsageError(
                f"--pq-bytes {self.pq_bytes}: the model's heads have {head_dim} channels; give a divisor of that"
            )
        parts, clusters = self._parts(layer.keys, self.pq_bytes), min(CODES, layer.keys.shape[1])
        labels = [kmeans(part, clusters, self.iterations, self.seed) for part in parts]
        means = [cluster_means(part, of_part, clusters)[0] for part, of_part in zip(parts, labels, strict=True)]
        codebooks = torch.stack(means, 1).half()
        return {"codebooks": codebooks, "codes": self._encode(parts, codebooks)}

    def append_layer(
        self, tensors: dict[str, torch.Tensor], layer: LayerInput, old_middle: int
    ) -> dict[str, torch.Tensor]:
        """Keep the codebooks, and encode the new keys with them."""
        codebooks = tensors["codebooks"]
        new = self._encode(self._parts(layer.keys[:, old_middle:], codebooks.shape[1]), codebooks)
        return {"codebooks": codebooks, "codes": torch.cat([tensors["codes"], new], 1)}

    @staticmethod
    def _parts(keys: torch.Tensor, parts: int) -> list[torch.Tensor]:
        """m tensors [Hk, M, D / m] float32 of neighbouring channels."""
        return [part.contiguous() for part in keys.float().chunk(parts, -1)]

    @staticmethod
    def _encode(parts: list[torch.Tensor], codebooks: torch.Tensor) -> torch.Tensor:
        nearest = [assign(part, book) for part, book in zip(parts, codebooks.float().unbind(1), strict=True)]
        return torch.stack(nearest, -1).to(torch.uint8)
