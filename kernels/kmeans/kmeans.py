"""k-means of keys, batched over heads: assignment, means, and Lloyd iterations."""

from collections.abc import Callable
from functools import partial

import torch

from sparsekv.kernels.common.on_gpu import on_gpu

CHANNELS = (2, 4, 8)
"""Numbers of channels of a point for which faiss keeps centres in registers.

For these numbers, faiss finds the nearest centres in half the time of a matrix product. For other numbers, faiss takes
four times as long as a matrix product.
"""
CENTRES = 256


class ShortPoints:
    """`nearest_centres` by faiss, for CENTRES centres and float32 points [H, M, D] on a CPU, with D one of CHANNELS.

    The points are copied. Other Python threads can run during the search. A search in plain torch would hold them up,
    because each of its many short operations needs Python's global lock.
    """

    def __init__(self, points: torch.Tensor):
        import faiss  # imported here, because only a CPU needs it

        H, M, D = points.shape
        self._set, self._faiss = faiss.copy_array_to_vector, faiss
        self._rows = points.transpose(0, 1).reshape(M, H * D).contiguous().numpy()
        self._quantiser = faiss.ProductQuantizer(H * D, H, 8)

    def __call__(self, centres: torch.Tensor) -> torch.Tensor:
        """Find the nearest of centres [H, CENTRES, D] for each point; return labels [H, M] int64."""
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        self._set(centres.float().contiguous().view(-1).numpy(), self._quantiser.centroids)
        return torch.from_numpy(self._quantiser.compute_codes(self._rows)).t().long()


# SCORES_AT_ONCE scores are computed at a time, so that they stay in a core's cache until they are searched. These are
# the scores of at least FEWEST_ROWS points.
SCORES_AT_ONCE, FEWEST_ROWS = 2**17, 64
LEAST_WEIGHT = 1e-30  # least divisor of a cluster's mean, so that the mean of an empty cluster is 0
FAR = 1e30  # factor that makes a difference of two scores, unless it is below 1e-24, exceed every index of a centre
SPACES = ("normalised", "raw", "centred")


def to_space(keys: torch.Tensor, space: str, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Convert keys [Hk, M, D] to the space in which they are clustered, in float32.

    `normalised` makes unit vectors (Squeezed Attention, section 3.1). `centred` makes unit vectors, too, but first
    subtracts each head's mean key (RetroInfer). `raw` leaves keys unchanged.

    Args:
        valid: [Hk, M] bool, keys to include in the mean, at least one in each head. None: all.
    """
    keys = keys.float()
    if space == "raw":
        return keys
    if space == "centred":
        weights = keys.new_ones(keys.shape[:2]) if valid is None else valid.float()
        keys = keys - ((weights[:, None] @ keys) / weights.sum(1)[:, None, None])
    return torch.nn.functional.normalize(keys, dim=-1)


def assign(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Find the nearest centre of each point by Euclidean distance.

    On a GPU, points and centres are rounded to float16; see `NearestCentres`.

    Args:
        points: [Hk, M, D]; centres: [Hk, C, D].

    Returns:
        [Hk, M] int64. On a GPU, allocates a float16 copy of the points. On a CPU, allocates 131,072 scores at a time,
        or those of 64 points if these are more. Where `ShortPoints` applies, allocates a copy of the points instead.
    """
    return nearest_centres(points, centres.shape[1])(centres)


@on_gpu("sparsekv.kernels.kmeans.kmeans_triton:NearestCentres")
def nearest_centres(points: torch.Tensor, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that finds the nearest of `number` centres for each of fixed points [Hk, M, D], like `assign`.

    The function's argument is the centres. On a GPU the points are rounded only once for all calls.
    """
    if number == CENTRES and points.shape[2] in CHANNELS and points.dtype == torch.float32:
        return ShortPoints(points)
    return partial(assign_plainly, points)


def assign_plainly(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Assign points to centres like `assign`, in plain torch and float32."""
    return largest_products(points, centres, centres.float().square().sum(-1) / -2)


def largest_products(points: torch.Tensor, centres: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Find the centre with the largest score for each point: the product of centre and point, plus the centre's bias.

    Among equal scores the first centre is found. A point with a score that is NaN or plus infinity gets centre 0.

    Args:
        points: [B, S, d]; centres: [B, C, d]; bias: [B, C] float32.

    Returns:
        [B, S] int64. Allocates about SCORES_AT_ONCE float32 scores, or those of FEWEST_ROWS points if these are more.
    """
    rows = max(FEWEST_ROWS, SCORES_AT_ONCE // centres.shape[1])
    numbers = torch.arange(centres.shape[1], dtype=torch.float32, device=points.device)
    labels = []
    for some, around, more in zip(points, centres.float(), bias, strict=True):
        across = around.T.contiguous()
        scores = (torch.addmm(more, part.float(), across) for part in some.split(rows))
        labels.append(torch.cat([_first_largest(part, numbers) for part in scores]))
    return torch.stack(labels).nan_to_num(0.0, 0.0).long()


def _first_largest(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the index, as float32, of the first largest score in each row of scores [T, C]; overwrites the scores.

    The result is NaN in a row with NaN or plus infinity. `numbers` [C] are the indices 0, 1, ... as float32. `argmax`
    takes twice as long over scores in a core's cache.
    """
    behind = scores.sub_(scores.amax(-1, keepdim=True))
    return torch.add(numbers, behind, alpha=-FAR).amin(-1)


@on_gpu("sparsekv.kernels.kmeans.kmeans_triton:cluster_means_triton")
def cluster_means(
    points: torch.Tensor, labels: torch.Tensor, clusters: int, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the weighted mean and the total weight of each cluster.

    Args:
        points: [Hk, M, D]; labels: [Hk, M]; weights: [Hk, M], ones when None.

    Returns:
        means [Hk, C, D] float32 (zeros for an empty cluster) and weights [Hk, C] float32. Both are deterministic,
        except in plain torch on a GPU.
    """
    weights = points.new_ones(labels.shape, dtype=torch.float32) if weights is None else weights.float()
    total = torch.zeros(len(points), clusters, device=points.device).scatter_add_(1, labels, weights)
    sums = torch.zeros(len(points), clusters, points.shape[-1], device=points.device)
    rows = labels[..., None].expand_as(points)
    sums.scatter_add_(1, rows, points.float() * weights[..., None])
    return sums / total.clamp(min=LEAST_WEIGHT)[..., None], total


def lloyd(
    points: torch.Tensor, centres: torch.Tensor, iterations: int, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run Lloyd iterations of assignment and means; a centre whose points have no weight does not move.

    Args:
        points: [Hk, M, D] float32; centres: [Hk, C, D], initial centres.
        weights: [Hk, M] float32, 0 for points to ignore; None: all 1.

    Returns:
        labels [Hk, M] of a final assignment, and the centres [Hk, C, D] of this assignment.
    """
    nearest, centres = moved_centres(points, centres, iterations, weights)
    return nearest(centres), centres


def moved_centres(
    points: torch.Tensor, centres: torch.Tensor, iterations: int, weights: torch.Tensor | None = None
) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """Run `lloyd` without its final assignment; return `nearest_centres` of the points, and the centres."""
    nearest = nearest_centres(points, centres.shape[1])
    for _ in range(iterations):
        means, counts = cluster_means(points, nearest(centres), centres.shape[1], weights)
        centres = torch.where(counts[..., None] > 0, means, centres)
    return nearest, centres


def random_kmeans(
    points: torch.Tensor, clusters: int, iterations: int, generator: torch.Generator, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Run k-means with random points of each head as initial centres; return the labels.

    Args:
        points: [Hk, M, D] float32.
        clusters: at most the number of valid points of any head.
        generator: random generator of the initial centres, on the points' device.
        valid: [Hk, M] bool, points to cluster; the others get label 0. None: all.

    Returns:
        [Hk, M] int64.
    """
    first = random_points(points, clusters, generator, valid)
    labels, _ = lloyd(points, first, iterations, None if valid is None else valid.float())
    return labels if valid is None else labels.masked_fill(~valid, 0)


def random_points(
    points: torch.Tensor,
    number: int,
    generator: torch.Generator,
    valid: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw `number` distinct points of each head from points [Hk, M, D]; return [Hk, number, D].

    Only points where `valid` [Hk, M] bool is True are drawn; each head must have `number` of them. Without `valid`, any
    point may be drawn. The probability of a point grows with its weight [Hk, M], which is above 0. Without `weights`,
    all points are equally probable.
    """
    random = torch.rand(points.shape[:2], generator=generator, device=points.device)
    # Each point draws an exponential variable with its weight as rate. The points with the smallest variables are
    # returned (Efraimidis and Spirakis, 2006).
    random = random if weights is None else -random.log() / weights
    random = random if valid is None else random.masked_fill(~valid, torch.inf)
    chosen = random.argsort(dim=-1)[:, :number]
    # The weights' rounding may differ between machines, and may swap two points whose variables are nearly equal. A
    # swap would number the centroids, and so all codes, differently. Therefore the points are sorted by index.
    chosen = chosen if weights is None else chosen.sort(-1).values
    return points.gather(1, chosen[..., None].expand(-1, -1, points.shape[-1]))
