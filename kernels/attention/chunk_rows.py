"""Gathers the rows that a chunk of a sparse prefill attends to: chosen rows first, then the chunk's own."""

import torch


def chunk_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor, *, padded: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chosen rows of keys and values, followed by the chunk's own rows, which are the last B.

    One kernel on a GPU.

    Args:
        query: [Hq, B, D]; keys, values: [Hk, T, D]; chosen: [Hk, K] int64, rows of each head before the chunk.
        padded: put K uninitialised queries in front, one for each chosen row.

    Returns:
        queries [Hq, K + B, D] if padded, else `query` itself; copies of keys and values [Hk, K + B, D].
    """
    if keys.is_cuda:
        from sparsekv.kernels.attention.chunk_rows_triton import chunk_rows_triton

        with torch.cuda.device_of(keys):  # Triton launches on the current device, which may be another
            return chunk_rows_triton(query, keys, values, chosen, padded=padded)
    return chunk_rows_reference(query, keys, values, chosen, padded=padded)


def chunk_rows_reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor, *, padded: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`chunk_rows` in plain torch."""
    places, chunk = chosen[..., None].expand(-1, -1, keys.shape[2]), query.shape[1]
    of_keys, of_values = (torch.cat([rows.gather(1, places), rows[:, -chunk:]], 1) for rows in (keys, values))
    anything = query.new_empty(len(query), chosen.shape[1], query.shape[2])
    return torch.cat([anything, query], 1) if padded else query, of_keys, of_values
