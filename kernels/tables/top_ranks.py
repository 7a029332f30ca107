"""Chooses the keys of highest rank, the same number in each head; on a GPU from counts of ranks, without a sort."""

import torch

from sparsekv.kernels.tables.types import KeyGroups, TokenRanks


def top_ranked(
    ranked: TokenRanks, wanted: int, names: torch.Tensor | None = None, groups: KeyGroups | None = None
) -> torch.Tensor:
    """Indices of the `wanted` keys of highest rank in each head; of equal ranks the first keys.

    On a GPU two kernels, or one where each rank is counted, no synchronisation, and the same result in every run.

    Args:
        wanted: K, at most the number of keys.
        names: [H, keys] int32, returned in place of the keys' indices.
        groups: counts what is chosen of each, by names where there are any.

    Returns:
        [H, K] int32, in the order of the keys.
    """
    if ranked.ranks.is_cuda:
        from sparsekv.kernels.tables.top_ranks_triton import top_ranked_triton

        with torch.cuda.device_of(ranked.ranks):  # Triton launches on the current device, which may be another
            return top_ranked_triton(ranked, wanted, names, groups)
    return top_ranked_reference(ranked, wanted, names, groups)


def top_ranked_reference(
    ranked: TokenRanks, wanted: int, names: torch.Tensor | None = None, groups: KeyGroups | None = None
) -> torch.Tensor:
    """`top_ranked` in plain torch."""
    order = ranked.in_order().argsort(dim=-1, descending=True, stable=True)
    best = order[:, :wanted].sort(-1).values
    chosen = best.int() if names is None else names.gather(1, best)
    if groups is not None:
        of_each = groups.labels.gather(1, chosen.long()).long()
        groups.taken.scatter_add_(1, of_each, torch.ones_like(chosen))
    return chosen
