"""PQCache, offline (arXiv 2407.12820): product quantisation of the middle keys, a byte for each part of a head.

Per KV head the channels are cut in as many parts as a key has bytes; each part is clustered by itself (faiss's k-means,
as its own product quantiser does), and a key's byte names its nearest centroid. As many as 256 centroids a part, fewer
where there are fewer keys.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.indexers.clustering import kmeans
from sparsekv.indexing.indexers.interface import Indexer, LayerInput, check_iterations
from sparsekv.indexing.indexers.registry import indexers
from sparsekv.kernels.kmeans.kmeans import assign, cluster_means

CODES = 256  # of a byte


@indexers.register("pqcache")
@dataclass(frozen=True)
class PQCacheIndexer(Indexer):
    """Codes of all keys of the middle."""

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
        """codebooks [Hk, m, C, D / m] float16, and codes [Hk, M, m] uint8, the nearest of them as they are stored.

        Allocates the keys in float32 once more.

        Raises:
            UsageError: the head does not divide into so many parts.
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
        """The codebooks as they are, and codes of the new keys in them."""
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
