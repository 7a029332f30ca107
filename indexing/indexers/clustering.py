"""k-means for each head of a layer: faiss on the CPU, our own kernels on a GPU, with a fixed seed."""

from concurrent.futures import ThreadPoolExecutor

import torch

from sparsekv.kernels.kmeans.kmeans import random_kmeans


def kmeans(
    points: torch.Tensor, clusters: int, iterations: int, seed: int, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Labels of a k-means per head, from one last assignment to the final centroids.

    Args:
        points: [Hk, M, D] float32.
        clusters: number of clusters, at most the number of valid points of any head.
        valid: [Hk, M] bool; invalid points are left out and get label 0. None: all are valid.

    Returns:
        [Hk, M] int64, the same in every run on one device. Clusters may be empty.
    """
    if points.is_cuda:
        generator = torch.Generator(points.device).manual_seed(seed)
        return random_kmeans(points, clusters, iterations, generator, valid)
    if valid is None:
        valid = torch.ones(points.shape[:2], dtype=torch.bool)

    def cluster(head: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return _kmeans_faiss(head[mask], clusters, iterations, seed)

    labels = torch.zeros(points.shape[:2], dtype=torch.int64)
    # A head a thread: faiss's product library lets only one call at a time use several, and these wait for each other.
    with ThreadPoolExecutor(min(len(points), torch.get_num_threads())) as threads:
        for of_head, mask, found in zip(labels, valid, threads.map(cluster, points, valid), strict=True):
            of_head[mask] = found
    return labels


def _kmeans_faiss(points: torch.Tensor, clusters: int, iterations: int, seed: int) -> torch.Tensor:
    import faiss  # here, as it is not needed on a GPU

    faiss.omp_set_num_threads(1)  # of this thread alone
    # The two bounds keep faiss from subsampling, and from printing warnings from C++ to the terminal.
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
