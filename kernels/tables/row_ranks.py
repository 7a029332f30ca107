"""Re-ranking: ranks given rows of each head for one query by their exact logits, after a cheaper method chose them."""

import torch

from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.kernels.tables.list_ranks import ranks_of
from sparsekv.kernels.tables.types import TokenRanks


def rank_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor,
    logsumexp: torch.Tensor,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> TokenRanks:
    """Ranks of rows by their attention probability, mean over the group; see `rank_tokens`.

    On a GPU two kernels, no synchronisation.

    Args:
        query: [H, G, D]; keys: [H, M, D], a head's rows contiguous; rows: [H, S] int32 of these.
        logsumexp: [H, G] float32, estimated over all keys; the log-sum-exp of the rows is used where it is larger.
        wanted: number of rows that will be chosen.

    Returns:
        See `TokenRanks`, of S keys. Allocates logits [H, G, S] float32.
    """
    if query.is_cuda:
        from sparsekv.kernels.tables.row_ranks_triton import rank_rows_triton

        with torch.cuda.device_of(query):  # Triton launches on the current device, which may be another
            return rank_rows_triton(query, keys, rows, logsumexp, wanted, softmax_scale, softcap)
    return rank_rows_reference(query, keys, rows, logsumexp, wanted, softmax_scale, softcap)


def rank_rows_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor,
    logsumexp: torch.Tensor,
    wanted: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> TokenRanks:
    """`rank_rows` in plain torch: gathers the keys."""
    gathered = keys.gather(1, rows.long()[..., None].expand(-1, -1, keys.shape[2]))
    logits = attention_logits(query[:, :, None], gathered, softmax_scale, softcap)[:, :, 0]
    return ranks_of(logits, torch.maximum(logsumexp, logits.logsumexp(-1)), wanted)
