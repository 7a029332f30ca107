"""Base class of indexers that cluster keys: k-means of each head, hierarchies of clusters, and blocks for appending."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import torch

from sparsekv.formats.device import read_ahead
from sparsekv.formats.errors import UsageError, check_choice
from sparsekv.indexing.indexers.interface import Indexer, Tensors, check_iterations
from sparsekv.kernels.kmeans.hierarchy import level_sizes, level_tensors, levels_above, number_neighbours, single_out
from sparsekv.kernels.kmeans.kmeans import SPACES, random_kmeans, to_space


def kmeans(
    points: torch.Tensor, clusters: int, iterations: int, seed: int, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Cluster the points of each head by k-means; return the labels of the assignment to the final centroids.

    Args:
        points: [Hk, M, D] float32.
        clusters: number of clusters, at most the number of valid points of any head.
        valid: [Hk, M] bool. Points that are not valid are ignored and get label 0. None: all points are valid.

    Returns:
        [Hk, M] int64, the same in each run on one device. Clusters may be empty.
    """
    if points.is_cuda:
        generator = torch.Generator(points.device).manual_seed(seed)
        return random_kmeans(points, clusters, iterations, generator, valid)
    if valid is None:
        valid = torch.ones(points.shape[:2], dtype=torch.bool)

    def cluster(head: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return _kmeans_faiss(head[mask], clusters, iterations, seed)

    labels = torch.zeros(points.shape[:2], dtype=torch.int64)
    # One thread per head. Only one call of faiss's BLAS library at a time can use several threads, and other calls
    # would wait.
    with ThreadPoolExecutor(min(len(points), torch.get_num_threads())) as threads:
        for of_head, mask, found in zip(labels, valid, threads.map(cluster, points, valid), strict=True):
            of_head[mask] = found
    return labels


def _kmeans_faiss(points: torch.Tensor, clusters: int, iterations: int, seed: int) -> torch.Tensor:
    import faiss  # imported here, because a GPU needs no faiss

    faiss.omp_set_num_threads(1)  # only for calls from this thread
    # The two bounds prevent faiss from subsampling the points, and from printing warnings to the terminal.
    data = points.contiguous().numpy()
    trained = faiss.Kmeans(
        data.shape[1],
        clusters,
        niter=iterations,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=len(data),
    )
    trained.train(data)
    return torch.from_numpy(trained.assign(data)[1])


S = TypeVar("S")
T = TypeVar("T")

MOST_ITEMS = 8
"""Largest number of items that are processed at a time."""
MOST_TOKENS = 1 << 18
"""Largest number of tokens of all items that are processed at a time. Memory grows by about 20 KB per token for `codes`
and the heads of an 8B model."""


def share_cores(
    items: Sequence[S], tokens: int, work: Callable[[S], T], total: int | None = None
) -> Generator[T, None, None]:
    """Yield `work(item)` for each item, in order; several items run at a time and share torch's threads.

    Args:
        tokens: number of tokens of one item.
        total: the number of items of the whole work, if `items` are only the remaining ones; None: the number of
            `items`. The rounding of sums depends on the number of threads that an item has. Therefore `total` must not
            depend on how many items remain.
    """
    threads = torch.get_num_threads()
    together = max(1, min(threads, MOST_ITEMS, total or len(items), MOST_TOKENS // max(1, tokens)))

    def begin() -> None:
        torch.set_num_threads(threads // together)
        # The gradient mode is set per thread, and so the caller's mode does not apply here.
        torch.set_grad_enabled(False)

    try:
        yield from read_ahead(items, work, together, begin)
    finally:
        # `begin` has changed MKL's number of threads for all threads, and torch's number for threads that start later.
        torch.set_num_threads(threads)


def split_blocks(tensors: Tensors) -> list[Tensors]:
    """Split tensors that `join_blocks` has joined into the tensors of each block.

    In each block clusters are numbered from 0. A block has only the levels' tensors and token_order.

    Args:
        tensors: the tensors that `join_blocks` returns, and block_offsets [blocks + 1].

    Returns:
        One dictionary per block. All tensors except `parent` are views.
    """
    offsets = tensors["block_offsets"].long()
    blocks: list[Tensors] = [{} for _ in offsets[1:]]
    for name, tensor in tensors.items():
        level = name.partition(".")[0]
        if name != "token_order" and not level.startswith("level"):
            continue
        cuts = offsets if name == "token_order" else _first_clusters(tensors[f"{level}.counts"], offsets)
        first_parents = [0] * len(blocks)
        if name.endswith(".parent"):
            above = f"level{int(level.removeprefix('level')) + 1}.counts"
            first_parents = _first_clusters(tensors[above], offsets).tolist()
        pieces = tensor.tensor_split(cuts[1:-1].cpu(), 1)
        for block, piece, first in zip(blocks, pieces, first_parents, strict=False):
            block[name] = piece - first if first else piece
    return blocks


def _first_clusters(counts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the first cluster of each block in one level, followed by the level's number of clusters.

    Empty clusters come last in their block. Therefore a block's first cluster is the first cluster whose tokens end
    after the block's first token. The first head is enough, because a block has as many clusters in every head.

    Args:
        counts: [Hk, C], token counts of the level's clusters.
        offsets: [blocks + 1], first token of each block, then the number of tokens.
    """
    ends = counts[0].long().cumsum(0)
    return torch.cat([torch.searchsorted(ends, offsets[:-1], right=True), offsets.new_tensor([len(ends)])])


def finest_labels(block: Tensors) -> torch.Tensor:
    """Return the finest cluster of each token of one block or of all blocks, [Hk, T] int64 in order of position."""
    order = block["token_order"].long()
    ends = block["level0.counts"].long().cumsum(1)
    rows = torch.arange(order.shape[1], device=order.device).expand_as(order).contiguous()
    clusters = torch.searchsorted(ends, rows, right=True)
    return torch.empty_like(clusters).scatter_(1, order - order.min(), clusters)


@dataclass(frozen=True)
class ClusterIndexer(Indexer):
    """Builds levels of clusters.

    `levels` are the numbers of centroids of each level, finest first, as shares of the clustered tokens.
    """

    levels: tuple[float, ...] = field(
        default=(0.05, 0.01),
        metadata={"help": "Number of centroids per level, as shares of the document's tokens, finest first."},
    )
    iterations: int = field(default=10, metadata={"help": "Iterations of k-means."})
    space: str = field(
        default="normalised",
        metadata={
            "help": "How keys are transformed before k-means: normalised to unit length, raw (unchanged), or centred "
            "(mean key subtracted, then normalised)."
        },
    )

    outliers: float = field(
        default=0.0,
        metadata={
            "help": "Share of the tokens, such as 0.03, that become additional clusters of one token each: the tokens "
            "farthest from their centroids. A step then reads this many more centroids; docs/benchmarks/evaluation.md "
            "measures the gain."
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
        check_choice("--space", self.space, SPACES)

    def cluster(
        self, keys: torch.Tensor, values: torch.Tensor, first_token: int, lookup_keys: torch.Tensor | None = None
    ) -> Tensors:
        """Cluster tokens as one block, and return the tensors of `level_tensors`.

        A share `outliers` of the tokens, those farthest from their centroids, get a cluster each on the finest level.
        Allocates the keys twice in float32.

        Args:
            keys, values: [Hk, M, D].
            first_token: position in the prompt of the first token.
            lookup_keys: [Hk, M, D], keys to cluster instead of `keys`.
        """
        points, sizes = keys if lookup_keys is None else lookup_keys, level_sizes(self.levels, keys.shape[1])
        labels, sizes[0] = single_out(points, self._kmeans(points, sizes[0]), sizes[0], self.outliers)
        levels = levels_above(points, labels, sizes, self._kmeans)
        attended = None if lookup_keys is None else keys
        return level_tensors(levels, number_neighbours(levels, labels), values, first_token, attended)

    def _kmeans(self, points: torch.Tensor, clusters: int, valid: torch.Tensor | None = None) -> torch.Tensor:
        return kmeans(to_space(points, self.space, valid), clusters, self.iterations, self.seed, valid)
