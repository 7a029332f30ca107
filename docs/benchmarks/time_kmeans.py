"""Check and time k-means, the update when tokens join multipole's clusters, and the clustering of a whole index.

Run it as `python docs/benchmarks/time_kmeans.py`.

On a GPU there are 8 heads of 131,072 keys, D = 128, and `--sweep` tries other tile sizes. On a CPU the sizes are small.
Keys are drawn from a mixture of clusters with log-normal sizes and a common mean, like the keys of a text. The package
flash-kmeans is timed too, if it is installed.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median, quantiles

import torch

from sparsekv.kernels.kmeans.hierarchy import REFINEMENTS, join_tokens
from sparsekv.kernels.kmeans.kmeans import (
    assign,
    assign_plainly,
    cluster_means,
    lloyd,
    nearest_centres,
    random_kmeans,
    to_space,
)
from sparsekv.runtime.selection.clusters.stream import join_by_graph

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SHARE, ITERATIONS, LAYERS = 0.05, 10, 36
# Tile sizes of the search: points and centres of a tile, warps, pipeline stages, programs on an SM.
SHAPES = (
    *((128, 128, 8, 2, 2), (128, 128, 8, 3, 1), (128, 128, 8, 4, 1), (128, 64, 4, 2, 3), (128, 64, 4, 3, 2)),
    *((128, 64, 8, 2, 2), (128, 64, 8, 3, 2), (128, 64, 8, 2, 3), (256, 64, 8, 2, 2), (256, 64, 8, 3, 2)),
    *((64, 128, 4, 2, 2), (64, 64, 4, 3, 3), (256, 128, 8, 2, 1), (256, 128, 8, 3, 1), (128, 256, 8, 2, 1)),
)
STEP, PER_CLUSTER = 128, 16  # tokens that join a block at once; tokens per cluster of a block


@dataclass(frozen=True)
class Size:
    """Size of a clustering: heads, keys, their channels, and how many of the keys one block holds."""

    heads: int
    keys: int
    dims: int
    block: int

    @property
    def clusters(self) -> int:
        return int(SHARE * self.keys)


def mixture(heads: int, keys: int, dims: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw keys [heads, keys, dims] from a mixture of clusters with log-normal weights.

    The heads' mean keys are longer than the keys' distances to them.
    """
    weights = torch.randn(heads, max(1, keys // 40), device=DEVICE).exp()
    centres = torch.randn(heads, weights.shape[1], dims, device=DEVICE) + 2 * torch.randn(heads, 1, dims, device=DEVICE)
    chosen = weights.multinomial(keys, replacement=True)
    points = centres.gather(1, chosen[..., None].expand(-1, -1, dims)) + 0.7 * torch.randn(
        heads, keys, dims, device=DEVICE
    )
    return points.to(dtype)


def timed(run: Callable[[], object], runs: int) -> tuple[float, float]:
    """Return the median of the milliseconds of some runs, and the distance between their quartiles."""
    run()
    found = []
    for _ in range(runs):
        if ON_GPU:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end))
        else:
            started = time.perf_counter()
            run()
            found.append(1000 * (time.perf_counter() - started))
    low, _, high = quantiles(found, n=4)
    return median(found), high - low


def show(name: str, milliseconds: tuple[float, float], note: str = "") -> None:
    """Print one line of a table."""
    print(f"  {name:44s} {milliseconds[0]:9.3f} ms ({milliseconds[1]:.3f}) {note}", flush=True)


def excess(points: torch.Tensor, centres: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the largest relative excess of a point's distance to its chosen centre over that to the nearest centre.

    It is relative to the point's distance to the mean point plus the largest distance of a centre to the mean point.
    """
    points, centres = points.double(), centres.double()
    mean = points.mean(1, keepdim=True)
    distances = torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist")
    chosen = distances.gather(2, labels[..., None])[..., 0]
    lengths = (points - mean).norm(dim=-1) + (centres - mean).norm(dim=-1).amax(1, keepdim=True)
    return float(((chosen - distances.amin(-1)) / lengths).max())


def check() -> None:
    """Compare nearest centres and means with float64, on new random points."""
    print(f"checks, seed {torch.seed()}")
    for dims in (64, 96, 128, 256):
        worst = off = 0.0
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            points = mixture(2, 3001, dims, dtype)
            centres = points[:, torch.randperm(3001)[:207]].float()
            labels = assign(points, centres)
            assert int(labels.min()) >= 0
            assert int(labels.max()) < 207
            worst = max(worst, excess(points, centres, labels))
            # Rounding to 11 bits moves two distances; the float32 rounding of a squared distance moves its root.
            assert worst <= 2**-10 + 2**-9, f"D {dims}, {dtype}: {worst}"
            weights = torch.rand(2, 3001, device=DEVICE)
            means, totals = cluster_means(points, labels, 207, weights)
            members = torch.nn.functional.one_hot(labels, 207).double() * weights[..., None].double()
            expected = members.transpose(1, 2) @ points.double() / members.sum(1).clamp(min=1)[..., None]
            off = max(off, float((means - expected).norm() / expected.norm()))
            assert off <= 1e-6, f"D {dims}, {dtype}: means off by {off}"
            assert float((totals - members.sum(1)).abs().max()) <= 1e-4
            assert torch.equal(means, cluster_means(points, labels, 207, weights)[0])
        print(f"  D {dims}: nearest centres within {worst:.1e} of the distances to the mean, means within {off:.1e}")


def check_at_size(points: torch.Tensor, centres: torch.Tensor) -> None:
    """Compare like `check`, at the size that is timed, for a sample of the points."""
    labels, clusters = assign(points, centres), centres.shape[1]
    some = torch.randperm(points.shape[1], device=DEVICE)[:1000]
    worst = excess(points[:, some], centres, labels[:, some])
    assert worst <= 2**-10 + 2**-9, f"nearest centres: {worst}"
    means, totals = cluster_means(points, labels, clusters)
    rows = labels[..., None].expand_as(points)
    sums = torch.zeros_like(means, dtype=torch.float64).scatter_add_(1, rows, points.double())
    off = float((means * totals[..., None] - sums).norm() / sums.norm())
    assert off <= 1e-6, f"means off by {off}"
    assert int(totals.sum()) == labels.numel()
    print(f"  nearest centres within {worst:.1e} of the distances to the mean, means within {off:.1e}")


def plain_lloyd(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Run `lloyd` in plain torch; return the labels."""
    for _ in range(ITERATIONS):
        means, counts = cluster_means.reference(points, assign_plainly(points, centres), centres.shape[1])
        centres = torch.where(counts[..., None] > 0, means, centres)
    return assign_plainly(points, centres)


def spread(points: torch.Tensor, labels: torch.Tensor, clusters: int) -> float:
    """Compute the mean squared distance of the points to their cluster's mean."""
    means, _ = cluster_means(points, labels, clusters)
    return float((points - means.gather(1, labels[..., None].expand_as(points))).square().sum(-1).mean())


def time_kmeans(size: Size, *, sweep: bool) -> None:
    """Time (a) the k-means of one layer."""
    points = to_space(mixture(size.heads, size.keys, size.dims), "normalised")
    first = points[:, torch.randperm(size.keys, device=DEVICE)[: size.clusters]].contiguous()
    products = 2 * size.heads * size.keys * size.clusters * size.dims
    print(f"k-means: {size.keys:,} keys x {size.heads} heads, {size.clusters:,} clusters, {ITERATIONS} iterations")
    check_at_size(points, first)
    took = timed(lambda: lloyd(points, first, ITERATIONS), 7 if ON_GPU else 3)
    labels = lloyd(points, first, ITERATIONS)[0]
    show("ours", took, f"spread {spread(points, labels, size.clusters):.6f}, largest {int(largest_cluster(labels))}")
    again = lloyd(points, first, ITERATIONS)[0]
    print(f"  the same labels again: {torch.equal(labels, again)}")
    time_flash_kmeans(points, first)
    nearest = nearest_centres(points, size.clusters)
    took = timed(lambda: nearest(first), 9)
    show("one assignment", took, f"{products / took[0] / 1e9:.0f} TFLOP/s")
    show("rounding of the points, once", timed(lambda: nearest_centres(points, size.clusters), 9))
    show("one turn's means", timed(lambda: cluster_means(points, labels, size.clusters), 9))
    show("  of which sorting", timed(lambda: labels.int().flatten().sort(stable=True), 9))
    show("means in plain torch", timed(lambda: cluster_means.reference(points, labels, size.clusters), 5))
    if sweep:
        time_tiles(points, first, products)
    took = timed(lambda: plain_lloyd(points, first), 2)
    show("plain torch", took, f"spread {spread(points, plain_lloyd(points, first), size.clusters):.6f}")


def largest_cluster(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of points in the largest cluster of the first head."""
    return labels[0].bincount().max()


def time_tiles(points: torch.Tensor, centres: torch.Tensor, products: int) -> None:
    """Time one assignment with other tile sizes."""
    from sparsekv.kernels.kmeans.kmeans_triton import NearestCentres, Tiles

    for shape in SHAPES:
        nearest = NearestCentres(points, centres.shape[1], Tiles(*shape))
        took = timed(partial(nearest, centres), 5)
        show(str(nearest.tiles), took, f"{products / took[0] / 1e9:.0f} TFLOP/s")


def time_flash_kmeans(points: torch.Tensor, centres: torch.Tensor) -> None:
    """Time the package flash-kmeans from the same centres, with as many assignments, in both dtypes it supports."""
    try:
        from flash_kmeans import batch_kmeans_Euclid
    except ImportError:
        print("  flash-kmeans is not installed")
        return
    for dtype in (torch.float16, torch.float32):
        rows, start = points.to(dtype), centres.to(dtype)

        def run(rows: torch.Tensor = rows, start: torch.Tensor = start) -> torch.Tensor:
            # The package returns the labels of the last iteration's first centres. One more iteration gives the result
            # that `lloyd` gives.
            found: torch.Tensor = batch_kmeans_Euclid(rows, centres.shape[1], ITERATIONS + 1, -1.0, start)[0]
            return found

        took = timed(run, 5)
        show(f"flash-kmeans, {dtype}", took, f"spread {spread(points, run().long(), centres.shape[1]):.6f}")


def time_online(size: Size) -> None:
    """Time (b) the update when tokens join a block: kernels launched one by one, and as one CUDA graph."""
    keys = mixture(size.heads, size.block + STEP, size.dims)
    old, all_clusters = size.block // PER_CLUSTER, (size.block + STEP) // PER_CLUSTER
    generator = torch.Generator(DEVICE).manual_seed(0)
    labels = random_kmeans(to_space(keys[:, : size.block], "normalised"), old, ITERATIONS, generator)

    def update() -> torch.Tensor:
        return join_tokens(to_space(keys, "normalised"), labels, old, all_clusters, generator)

    print(f"online update: {size.block:,} + {STEP} keys x {size.heads} heads, {old} + {all_clusters - old} clusters")
    show(f"launch by launch, {REFINEMENTS} iterations", timed(update, 20))
    generator.manual_seed(1)
    expected = update()
    if not ON_GPU:
        return
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        joined = update()
    joined.fill_(-1)
    generator.manual_seed(1)
    graph.replay()
    print(f"  the graph's labels are the same: {torch.equal(joined, expected)}")
    show("as one graph", timed(graph.replay, 50))
    points, turn = to_space(keys, "normalised"), count()

    def layers(join: Callable[..., torch.Tensor]) -> None:
        more = next(turn) % 2  # another number of clusters than the last time, because the same number reuses the graph
        for _ in range(LAYERS):
            join(points, labels, old, all_clusters + more, generator)

    show(f"{LAYERS} layers, launch by launch", timed(partial(layers, join_tokens), 6))
    show(f"{LAYERS} layers by a graph, with its recording", timed(partial(layers, join_by_graph), 6))


def time_index(size: Size) -> None:
    """Time (c) the clustering of one layer for a squeezed index of two levels; print the time of all layers, too."""
    from sparsekv.indexing.methods.squeezed import SqueezedIndexer

    indexer = SqueezedIndexer(levels=(SHARE, 0.01))
    keys, values = (mixture(size.heads, size.keys, size.dims, torch.bfloat16) for _ in range(2))
    took = timed(lambda: indexer.cluster(keys, values, 4), 5)
    print(f"squeezed index of levels {indexer.levels}: {size.keys:,} keys x {size.heads} heads")
    show("one layer", took, f"{LAYERS} layers: {LAYERS * took[0] / 1000:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="Also time one assignment in other block shapes.")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if ON_GPU else f"{torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}; medians (between quartiles)")
    check()
    size = Size(8, 131_072, 128, 8192) if ON_GPU else Size(2, 2048, 64, 512)
    time_kmeans(size, sweep=arguments.sweep and ON_GPU)
    time_online(size)
    time_index(size)


if __name__ == "__main__":
    main()
