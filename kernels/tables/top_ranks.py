"""Chooses the keys of highest rank, the same number in each head; on a GPU from counts of ranks, without a sort."""

import torch

from sparsekv.kernels.tables.types import TokenRanks


def top_ranked(ranked: TokenRanks, wanted: int, names: torch.Tensor | None = None) -> torch.Tensor:
    """Indices of the `wanted` keys of highest rank in each head; of equal ranks the first keys.

    On a GPU two kernels, no synchronisation, and the same result in every run.

    Args:
        wanted: K, at most the number of keys.
        names: [H, keys] int32, returned in place of the keys' indices.

    Returns:
        [H, K] int32, in the order of the keys.
    """
    if ranked.ranks.is_cuda:
        from sparsekv.kernels.tables.top_ranks_triton import top_ranked_triton

        with torch.cuda.device_of(ranked.ranks):  # Triton launches on the current device, which may be another
            return top_ranked_triton(ranked, wanted, names)
    return top_ranked_reference(ranked, wanted, names)


def top_ranked_reference(ranked: TokenRanks, wanted: int, names: torch.Tensor | None = None) -> torch.Tensor:
    """`top_ranked` in plain torch."""
    order = ranked.in_order().argsort(dim=-1, descending=True, stable=True)
    best = order[:, :wanted].sort(-1).values
    return best.int() if names is None else names.gather(1, best)
