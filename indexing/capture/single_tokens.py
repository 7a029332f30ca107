"""Queries of single tokens of a prompt whose keys and values are known: these tokens alone run through the model."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from sparsekv.kernels.attention.attention import Segment, attend
from sparsekv.kernels.common.hook import AttentionCall, route_attention

LOGIT_BYTES = 2**28
"""Memory for logits: so many queries attend at once that theirs fit, in float32."""


@torch.inference_mode()
def queries_of_tokens(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    rows: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    chunk_size: int,
) -> dict[int, torch.Tensor]:
    """Queries [Hq, P, D] at `positions`, by layer, of layers with full attention, as of a dense prefill of the prompt.

    A token's query depends on other tokens by their keys and values alone. Besides these queries, and what the model
    allocates for a chunk, memory holds one layer's rows and twice LOGIT_BYTES.

    Args:
        input_ids: [N] int64.
        positions: [P] int64, rising.
        chunk_size: tokens per forward pass.
        rows: returns a layer's keys and values [Hk, T, D] as attended, of the first T tokens, on the model's device;
            T is more than the last position.
    """
    queries: dict[int, list[torch.Tensor]] = {}
    for some in positions.split(chunk_size):
        at = some.to(model.device)

        def attend_to_rows(call: AttentionCall, at: torch.Tensor = at) -> torch.Tensor:
            if call.window is None:
                queries.setdefault(call.layer, []).append(call.query.clone())
            return _attend_at(call, at, *rows(call.layer))

        with route_attention(model, attend_to_rows):
            ids = input_ids.to(model.device)[at][None]
            # With a mask of its own transformers does not take a gap between positions for the start of another text.
            whole = torch.ones_like(ids)
            model(input_ids=ids, attention_mask=whole, position_ids=at[None], use_cache=False, logits_to_keep=1)
    return {layer: torch.cat(parts, 1) for layer, parts in queries.items()}


def _attend_at(call: AttentionCall, at: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention [Hq, P, D] of a call's queries at positions [P], each to the rows [Hk, T, D] up to its own."""
    (Hk, T, _), (Hq, P, _) = keys.shape, call.query.shape
    query = call.query.unflatten(0, (Hk, -1))
    sinks = None if call.sink_logits is None else call.sink_logits.view(Hk, -1)
    numbers, at_once = torch.arange(T, device=at.device), max(1, LOGIT_BYTES // (4 * Hq * T))
    parts = []
    for start in range(0, P, at_once):
        distance = at[start : start + at_once, None] - numbers
        mask = (distance >= 0) & (distance < (T if call.window is None else call.window))
        part = query[:, :, start : start + at_once]
        parts.append(attend(part, [Segment(keys, values, mask)], call.softmax_scale, call.softcap, sinks))
    return torch.cat(parts, 2).flatten(0, 1)
