"""Attention of several sequences over one document by kernels that read what is shared once, and in place."""

from collections.abc import Sequence

import torch

from sparsekv.kernels.attention.attention import weigh
from sparsekv.kernels.attention.shared_attention import OwnRows, own_logits
from sparsekv.kernels.attention.types import Centroids, RunRows
from sparsekv.kernels.scores.logits import attention_logits


def shared_decode(
    query: torch.Tensor,
    runs: RunRows,
    exact: tuple[torch.Tensor, torch.Tensor],
    stand_ins: Sequence[Centroids],
    own: OwnRows,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """One softmax for each query, over shared runs, exact rows and centroids, and over the rows of its own sequence.

    On a GPU three launches, no synchronisation, and no shapes that depend on data.

    Args:
        query: [Hk, G, B, D] of B tokens.
        runs: single rows.
        exact: keys and values [Hk, E, D] that all attend to; a head's rows are contiguous, heads need not be.
        stand_ins: at most one set of centroids that all attend to.
        own: rows that each of the B tokens attends to alone.
        sink_logits: [Hk, G] learned logits without values (GPT-OSS).

    Returns:
        [Hk, G, B, D] in the query's dtype.
    """
    arguments = query, runs, exact, stand_ins, own, softmax_scale, softcap, sink_logits
    if query.is_cuda:
        from sparsekv.kernels.attention.shared_decode_triton import shared_decode_triton

        with torch.cuda.device_of(query):  # Triton launches on the current device, which may be another
            return shared_decode_triton(*arguments)
    return shared_decode_reference(*arguments)


def shared_decode_reference(
    query: torch.Tensor,
    runs: RunRows,
    exact: tuple[torch.Tensor, torch.Tensor],
    stand_ins: Sequence[Centroids],
    own: OwnRows,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """`shared_decode` in plain torch: gathers the rows."""
    (Hk, G, B, D), how = query.shape, (softmax_scale, softcap)
    rows = runs.starts[:, : runs.capacity].long()
    used = rows.new_full((Hk,), runs.capacity) if runs.used is None else runs.used
    valid = torch.arange(rows.shape[1], device=rows.device) < used[:, None]
    places = torch.where(valid, rows, 0)[..., None].expand(-1, -1, D)
    keys, values = (held.gather(1, places) for held in (runs.keys, runs.values))
    chosen = attention_logits(query, keys, *how).masked_fill(~valid[:, None, None], -torch.inf)
    logits = [chosen, attention_logits(query, exact[0], *how)]
    for part in stand_ins:
        counts = part.log_counts[:, None, None, : part.keys.shape[1]]
        logits.append(attention_logits(query, part.keys, *how) + counts)
    everyones = torch.cat([values, exact[1], *(part.values for part in stand_ins)], 1)
    logits.append(own_logits(query, own, *how))
    if sink_logits is not None:
        logits.append(sink_logits.float()[:, :, None, None].expand(Hk, G, B, 1))
    shared, each = (
        torch.cat(logits, -1)
        .softmax(-1)
        .split_with_sizes(
            [everyones.shape[1], logits[-1].shape[-1] if sink_logits is None else own.keys.shape[2] + 1], -1
        )
    )
    each = each[..., : own.keys.shape[2]]
    output = weigh(shared.flatten(1, 2).to(query.dtype), [everyones]).view(Hk, G, B, -1)
    return output + torch.einsum("hgbt,bhtd->hgbd", each.to(query.dtype), own.values[own.slots].to(query.dtype))
