"""What dense attention loses by how a layer's keys and values are stored."""

from collections.abc import Mapping

import torch

from sparsekv.formats.context_rows import Pair, context_rows
from sparsekv.formats.schema import LayerFacts
from sparsekv.kernels.attention.attention import Segment, attend, causal_mask

LOGITS_AT_ONCE = 64 * 2**20  # elements of [Hq, Q, N] float32 logits: 256 MB


def storing_error(
    queries: torch.Tensor,
    exact: Pair,
    tensors: Mapping[str, torch.Tensor],
    facts: LayerFacts,
    sink_logits: torch.Tensor | None,
) -> float:
    """Relative error of dense attention over stored rows against dense attention over the exact ones.

    |o_stored - o_exact| / |o_exact| of each query and head, as reports define the error of an output, and the mean of
    these. Allocates 256 MB of logits at a time, a few times over, the layer's rows restored, and those of the heads at
    hand in float32.

    Args:
        queries: [Hq, R, D], of the prompt's last R tokens.
        exact: keys and values [Hk, N, D].
        tensors: the file that stores them.
        sink_logits: [Hq], where the layer has them.
    """
    stored = context_rows(tensors, exact[0].dtype).part(slice(None))
    Hk, tokens, _ = exact[0].shape
    # In float32: the error is then that of the rows, without the rounding of outputs.
    grouped = queries.float().unflatten(0, (Hk, -1))
    sinks = None if sink_logits is None else sink_logits.view(Hk, -1)
    visible = causal_mask(queries.shape[1], tokens, facts.sliding_window, queries.device)
    _, G, Q, _ = grouped.shape
    # All queries of a head first, as its rows are converted to float32 each time.
    heads, at_once, errors = max(1, LOGITS_AT_ONCE // (G * Q * tokens)), max(1, LOGITS_AT_ONCE // (G * tokens)), []
    for start in range(0, Hk, heads):
        part = slice(start, start + heads)
        how = facts.softmax_scale, facts.softcap, None if sinks is None else sinks[part]
        for some, seen in zip(grouped[part].split(at_once, 2), visible.split(at_once), strict=True):
            there, right = (
                attend(some, [Segment(keys[part], values[part], seen)], *how) for keys, values in (stored, exact)
            )
            lengths = right.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
            errors.append(((there - right).norm(dim=-1) / lengths).flatten())
    return float(torch.cat(errors).double().mean())
