"""Nearest centres of short points on a CPU, by faiss's product quantiser: each batch entry is one of its parts."""

import torch

CHANNELS = (2, 4, 8)
"""For points of so many channels faiss keeps centres in registers, and takes half of the time that a product does; with
others it takes four times as long."""
CENTRES = 256


class ShortPoints:
    """`nearest_centres` for points [H, M, D], D one of CHANNELS, of float32 on a CPU. Allocates them once more.

    Other threads run meanwhile: a search in plain torch is many short operations, which take turns at Python's lock.
    """

    def __init__(self, points: torch.Tensor):
        import faiss  # here, as it is needed on a CPU alone

        H, M, D = points.shape
        self._set, self._faiss = faiss.copy_array_to_vector, faiss
        self._rows = points.transpose(0, 1).reshape(M, H * D).contiguous().numpy()
        self._quantiser = faiss.ProductQuantizer(H * D, H, 8)

    def __call__(self, centres: torch.Tensor) -> torch.Tensor:
        """Labels [H, M] int64 by centres [H, CENTRES, D]."""
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        self._set(centres.float().contiguous().view(-1).numpy(), self._quantiser.centroids)
        return torch.from_numpy(self._quantiser.compute_codes(self._rows)).t().long()
