"""k-means on a GPU: nearest centres by tensor cores with a fused argmax, and means over sorted labels."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparsekv.kernels.common.launch import power_of_two, unit_stride
from sparsekv.kernels.kmeans.kmeans import LEAST_WEIGHT

FARTHEST_MEAN = 4096.0  # largest magnitude of a scaled mean's channel; the largest float16 is nearly 16 times this
REGISTERS = 65_536  # registers of an SM
ROWS_AT_ONCE = 32  # rows of a tile in the kernels for means and for rounding


@dataclass(frozen=True)
class Tiles:
    """Sizes of a program that searches nearest centres: points and centres of a matrix product, warps, pipeline stages.

    `programs` is the number of programs that should fit on an SM. While one program takes the maximum of its scores,
    another keeps the tensor cores busy.
    """

    points: int
    centres: int
    warps: int
    stages: int
    programs: int = 2

    @property
    def registers(self) -> int:
        """Maximum number of registers of a thread with which all programs fit on an SM."""
        return min(255, REGISTERS // (32 * self.warps * self.programs))

    def shared_bytes(self, dims: int) -> int:
        """Compute a program's bytes of shared memory: its points, and one tile of centres per stage, in float16."""
        return 2 * dims * (self.points + self.stages * self.centres)


# The first entry that fits in shared memory is used. Tensor cores read both tiles from shared memory. With tiles of 64
# centres they need all of the memory's bandwidth, and with 128 centres three quarters. Centres are read once for each
# tile of points.
TILES = (Tiles(128, 128, 8, 2), Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 1))


@triton.jit
def _round_rows(
    rows, means, scales, rounded, half_norms, count, padded_count, head_stride, row_stride, dims,
    DIMS: tl.constexpr, ROWS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Write rows in float16, minus their head's mean and scaled, with zeros past the last row.

    With NORMS, also write half of the squared norms of the rounded rows.
    """
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    inside = (row < count)[:, None] & (dim < dims)[None, :]
    at = head * head_stride + row[:, None].to(tl.int64) * row_stride + dim[None, :]
    found = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(means + head * dims + dim, mask=dim < dims, other=0.0)
    scaled = (found - mean[None, :]) * tl.load(scales + head)
    # Rows are clamped to the largest finite float16, because products of infinities may be NaN.
    half = tl.where(inside, tl.minimum(tl.maximum(scaled, -65504.0), 65504.0), 0.0).to(tl.float16)
    to = head * padded_count + row
    tl.store(rounded + to[:, None] * DIMS + dim[None, :], half, mask=(row < padded_count)[:, None])
    if NORMS:
        wide = half.to(tl.float32)
        half_norm = tl.where(row < count, tl.sum(wide * wide, 1) / 2, float("inf"))
        tl.store(half_norms + to, half_norm, mask=row < padded_count)


@triton.jit
def _find_nearest(
    points, centres, half_norms, labels, count, padded_clusters,
    DIMS: tl.constexpr, POINTS: tl.constexpr, CENTRES: tl.constexpr,
):  # fmt: skip
    """Find, for a tile of points p, the centre c with the highest p c - |c|^2 / 2; scores stay in registers."""
    head = tl.program_id(1).to(tl.int64)
    point = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    dim, column = tl.arange(0, DIMS), tl.arange(0, CENTRES)
    at = head * count + point
    tile = tl.load(points + at[:, None] * DIMS + dim[None, :], mask=(point < count)[:, None], other=0.0)
    centres += head * padded_clusters * DIMS
    half_norms += head * padded_clusters
    best = tl.full([POINTS], float("-inf"), tl.float32)
    label = tl.zeros([POINTS], tl.int32)
    for first in range(0, padded_clusters, CENTRES):
        centre = tl.load(centres + (first + column)[:, None] * DIMS + dim[None, :])
        half_norm = tl.load(half_norms + first + column)
        scores = tl.dot(tile, tl.trans(centre)) - half_norm[None, :]
        highest, where = tl.max(scores, 1, return_indices=True, return_indices_tie_break_left=False)
        better = highest > best
        best = tl.where(better, highest, best)
        label = tl.where(better, first + where, label)
    tl.store(labels + at, label.to(tl.int64), mask=point < count)


@triton.jit
def _sum_runs(
    points, order, starts, weights, means, totals, count, clusters, head_stride, row_stride, dims, DIMS: tl.constexpr,
    ROWS: tl.constexpr, WEIGHTED: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Compute the weighted mean and the total weight of one cluster; the order of summation is fixed.

    The points of the cluster are a contiguous range of `order`, which sorts all points by cluster.
    """
    cluster = tl.program_id(0).to(tl.int64)
    head = cluster // clusters
    start, end = tl.load(starts + cluster), tl.load(starts + cluster + 1)
    dim = tl.arange(0, DIMS)
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, DIMS], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    for first in range(start, end, ROWS):
        inside = first + row < end
        point = tl.load(order + first + row, mask=inside, other=0)
        one = tl.load(weights + point, mask=inside, other=0.0) if WEIGHTED else inside.to(tl.float32)
        at = points + head * head_stride + (point - head * count)[:, None] * row_stride + dim[None, :]
        found = tl.load(at, mask=inside[:, None] & (dim < dims)[None, :], other=0.0).to(tl.float32)
        total += found * one[:, None]
        weight += one
    weighed = tl.sum(weight, 0)
    tl.store(means + cluster * dims + dim, tl.sum(total, 0) / tl.maximum(weighed, LEAST), mask=dim < dims)
    tl.store(totals + cluster, weighed)


class NearestCentres:
    """Search for the nearest centres of fixed points, with centres that change between calls.

    The head's mean point is subtracted from points and centres. Both are scaled so that no coordinate of a point has a
    magnitude above 1, and rounded to float16. Products are summed in float32. Norms are computed from the rounded
    centres, so that a point that equals a centre has distance 0 from it.

    Rounding moves a point or a centre by at most 2^-11 of its distance to the mean, if its coordinates are in float16's
    normal range. So the chosen centre is further from the point than the nearest centre by at most 2^-10 times the sum
    of two distances: the point's distance to the mean, and the larger distance of the two centres to the mean. Besides,
    rounding of the float32 sums adds up to 2^-19 times the square of this sum to the squared distance of the chosen
    centre. bfloat16 takes the same time and has eight times the error. tf32 has the same error and takes twice the
    time.

    A centre's coordinate that is more than 65,504 times as far from the mean as the farthest coordinate of a point is
    clamped. Centres that differ only in clamped coordinates are not distinguished.
    """

    def __init__(self, points: torch.Tensor, number: int, tiles: Tiles | None = None):
        """Copy points [Hk, M, D] of any floating dtype to float16, with D padded to a power of two, at least 16.

        `number` is the number of centres of each call. Without `tiles`, the first of TILES that fits in shared memory
        is used.
        """
        self.tiles = tiles or _fitting_tiles(_padded(points.shape[2]), points.device)
        self.padded_clusters = triton.cdiv(number, self.tiles.centres) * self.tiles.centres
        self.means = points.mean(1, dtype=torch.float32)
        least, greatest = points.aminmax(dim=1)
        radius = torch.maximum(greatest.float() - self.means, self.means - least.float()).amax(1)
        # If all points are equal, the scale depends on the mean alone.
        radius = torch.maximum(radius, self.means.abs().amax(1) / FARTHEST_MEAN)
        self.scales = 1 / radius.clamp(min=1e-30)
        self.points, _ = self._rounded(points, points.shape[1])

    def __call__(self, centres: torch.Tensor) -> torch.Tensor:
        """Find the nearest of centres [Hk, C, D] for each point; return labels [Hk, M] int64.

        Copies the centres to float16.
        """
        (Hk, count, dims), clusters = self.points.shape, self.padded_clusters
        labels = torch.empty(Hk, count, dtype=torch.int64, device=self.points.device)
        with torch.cuda.device_of(self.points):  # Triton launches on the current device, which may differ
            rounded, half_norms = self._rounded(centres, clusters, norms=True)
            _find_nearest[(triton.cdiv(count, self.tiles.points), Hk)](
                self.points, rounded, half_norms, labels, count, clusters,
                DIMS=dims, POINTS=self.tiles.points, CENTRES=self.tiles.centres,
                num_warps=self.tiles.warps, num_stages=self.tiles.stages, maxnreg=self.tiles.registers,
            )  # fmt: skip
        return labels

    def _rounded(
        self, rows: torch.Tensor, padded_count: int, *, norms: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round rows to float16, [Hk, padded_count, padded D]; with `norms`, also compute half of their squared norms.

        The half squared norms are [Hk, padded_count] float32, and infinite for padding.
        """
        rows, (Hk, count, dims) = unit_stride(rows), rows.shape
        rounded = rows.new_empty(Hk, padded_count, _padded(dims), dtype=torch.float16)
        half_norms = rows.new_empty(Hk, padded_count if norms else 0, dtype=torch.float32)
        _round_rows[(triton.cdiv(padded_count, ROWS_AT_ONCE), Hk)](
            rows, self.means, self.scales, rounded, half_norms, count, padded_count, *rows.stride()[:2], dims,
            DIMS=_padded(dims), ROWS=ROWS_AT_ONCE, NORMS=norms,
        )  # fmt: skip
        return rounded, half_norms


def cluster_means_triton(points, labels, clusters, weights=None):
    """Run `cluster_means` on a GPU, with sums in the order of the points.

    Sorting the labels moves 12 bytes per point a few times. The sums then read 4 D bytes per float32 point once. Atomic
    adds would read as many bytes, write all of them to the L2 cache, and round in an arbitrary order.
    """
    points, (Hk, count, dims) = unit_stride(points), points.shape
    first = torch.arange(0, Hk * clusters, clusters, dtype=torch.int32, device=points.device)
    ordered, order = (labels.int() + first[:, None]).flatten().sort(stable=True)
    numbers = torch.arange(Hk * clusters + 1, dtype=torch.int32, device=points.device)
    means = torch.empty(Hk, clusters, dims, device=points.device)
    totals = torch.empty(Hk, clusters, device=points.device)
    _sum_runs[(Hk * clusters,)](
        points, order, torch.searchsorted(ordered, numbers),
        totals if weights is None else weights.float().contiguous(),
        means, totals, count, clusters, *points.stride()[:2], dims,
        DIMS=_padded(dims), ROWS=ROWS_AT_ONCE, WEIGHTED=weights is not None, LEAST=LEAST_WEIGHT,
    )  # fmt: skip
    return means, totals


def _padded(dims: int) -> int:
    """Pad D for `tl.dot` to a power of two, at least 16."""
    return max(16, power_of_two(dims))


def _fitting_tiles(dims: int, device: torch.device) -> Tiles:
    if device.type != "cuda":  # kernels run in the interpreter
        return TILES[-1]
    limit = triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return next((tiles for tiles in TILES if tiles.shared_bytes(dims) <= limit), TILES[-1])
