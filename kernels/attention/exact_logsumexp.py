"""The log-sum-exp of several sequences' logits on the rows that they always attend to, shared ones and their own."""

import torch

from sparsekv.kernels.attention.shared_attention import OwnRows, own_logits
from sparsekv.kernels.scores.logits import attention_logits


def exact_logsumexp(
    query: torch.Tensor,
    keys: torch.Tensor,
    own: OwnRows,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """The log-sum-exp of each query's logits on shared keys, on its own rows, and of learned sinks.

    On a GPU one launch, and no rows are copied.

    Args:
        query: [Hk, G, B, D] of B tokens.
        keys: [Hk, E, D]; a head's rows are contiguous.
        own: rows that each of the B tokens attends to alone.
        sink_logits: [Hk, G] learned logits without values (GPT-OSS).

    Returns:
        [Hk, G, B] float32; minus infinity for nothing.
    """
    arguments = query, keys, own, softmax_scale, softcap, sink_logits
    if query.is_cuda:
        from sparsekv.kernels.attention.exact_logsumexp_triton import exact_logsumexp_triton

        with torch.cuda.device_of(query):  # Triton launches on the current device, which may be another
            return exact_logsumexp_triton(*arguments)
    return exact_logsumexp_reference(*arguments)


def exact_logsumexp_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    own: OwnRows,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """`exact_logsumexp` in plain torch: copies each sequence's rows."""
    shared = attention_logits(query, keys, softmax_scale, softcap)
    total = torch.cat([shared, own_logits(query, own, softmax_scale, softcap)], -1).logsumexp(-1)
    return total if sink_logits is None else torch.logaddexp(total, sink_logits[..., None].float())
