"""Base class of indexers that cluster keys: their parameters, and the hierarchical clustering of a range of tokens."""

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.suggestions import choose_one
from sparsekv.indexing.indexers.clustering import kmeans
from sparsekv.indexing.indexers.interface import Indexer, check_iterations
from sparsekv.kernels.kmeans.hierarchy import level_sizes, level_tensors, levels_above, number_neighbours
from sparsekv.kernels.kmeans.kmeans import SPACES, to_space
from sparsekv.kernels.kmeans.outliers import single_out


@dataclass(frozen=True)
class ClusterIndexer(Indexer):
    """Builds levels of clusters; `levels` are centroids per level, finest first, as shares of the tokens clustered."""

    levels: tuple[float, ...] = field(
        default=(0.05, 0.01),
        metadata={"help": "Number of centroids per level, as shares of the document's tokens, finest first."},
    )
    iterations: int = field(default=10, metadata={"help": "Iterations of k-means."})
    space: str = field(
        default="normalised",
        metadata={"help": f"How keys are transformed before k-means: {', '.join(SPACES)} (mean key subtracted)."},
    )

    outliers: float = field(
        default=0.0,
        metadata={
            "help": "Share of the tokens, such as 0.03: those farthest from their centroids become clusters of one "
            "token each, beside the others. A step reads as many centroids more; docs/benchmarks/evaluation.md says "
            "what that gains."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        falling = all(a > b for a, b in pairwise(self.levels))
        if not self.levels or not falling or not all(0 < share <= 1 for share in self.levels):
            raise UsageError(f"--levels {self.levels}: give falling shares between 0 and 1, such as 0.05,0.01")
        if not 0 <= self.outliers <= 1:
            raise UsageError(f"--outliers {self.outliers:g}: give a share from 0 to 1, such as 0.03")
        check_iterations(self.iterations)
        if self.space not in SPACES:
            raise UsageError(f"--space {self.space}: {choose_one(self.space, SPACES)}")

    def cluster(
        self, keys: torch.Tensor, values: torch.Tensor, first_token: int, lookup_keys: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Cluster tokens together and return the tensors of `level_tensors`; allocates the keys once more in float32.

        With `outliers` the finest level has as many clusters more.

        Args:
            keys, values: [Hk, M, D].
            first_token: position in the prompt of the first token.
            lookup_keys: [Hk, M, D], clustered instead of the keys.
        """
        points, sizes = keys if lookup_keys is None else lookup_keys, level_sizes(self.levels, keys.shape[1])
        labels, sizes[0] = single_out(points, self._kmeans(points, sizes[0]), sizes[0], self.outliers)
        levels = levels_above(points, labels, sizes, self._kmeans)
        attended = None if lookup_keys is None else keys
        return level_tensors(levels, number_neighbours(levels, labels), values, first_token, attended)

    def _kmeans(self, points: torch.Tensor, clusters: int, valid: torch.Tensor | None = None) -> torch.Tensor:
        return kmeans(to_space(points, self.space, valid), clusters, self.iterations, self.seed, valid)
