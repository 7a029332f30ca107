"""Measure each layer's RoPE by running the model, and compute single tokens' queries from stored keys and values."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from sparsekv.formats.index.context_rows import Pair
from sparsekv.formats.index.schema import RopeFacts
from sparsekv.kernels.attention.attention import Segment, attend
from sparsekv.kernels.common.given_rows import keys_of_one_token
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.kernels.common.row_operations import rotate, split_pairs

LOGIT_BYTES = 2**28
"""Largest size, in bytes, of the float32 logits of the queries that attend at a time."""


@torch.inference_mode()
def queries_of_tokens(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    rows: Callable[[int], Pair],
    chunk_size: int,
) -> dict[int, torch.Tensor]:
    """Compute the queries [Hq, P, D] at `positions`, as a dense prefill of the prompt would compute them.

    The result has an entry for each layer with full attention. Only the tokens at `positions` run through the model,
    because a token's query depends on other tokens only through their keys and values. Allocates these queries, the
    model's memory for a chunk, one layer's rows, and three times LOGIT_BYTES.

    Args:
        input_ids: [N] int64.
        positions: [P] int64, ascending.
        chunk_size: tokens per forward pass.
        rows: returns a layer's keys and values [Hk, T, D] as attended, of the first T tokens, on the model's device.
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
            # Without a mask, transformers would treat a gap between positions as the start of another packed sequence.
            whole = torch.ones_like(ids)
            model(input_ids=ids, attention_mask=whole, position_ids=at[None], use_cache=False, logits_to_keep=1)
    return {layer: torch.cat(parts, 1) for layer, parts in queries.items()}


def _attend_at(call: AttentionCall, at: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Compute causal attention [Hq, P, D] of a call's queries at positions [P] to rows [Hk, T, D]."""
    T, (Hq, P, _), query = keys.shape[1], call.query.shape, call.grouped
    numbers, at_once = torch.arange(T, device=at.device), max(1, LOGIT_BYTES // (4 * Hq * T))
    parts = []
    for start in range(0, P, at_once):
        distance = at[start : start + at_once, None] - numbers
        mask = (distance >= 0) & (distance < (T if call.window is None else call.window))
        part = query[:, :, start : start + at_once]
        parts.append(attend(part, [Segment(keys, values, mask)], *call.scaling))
    return torch.cat(parts, 2).flatten(0, 1)


# Largest error of a predicted rotation, relative to the length of a pair of channels. A wrong RoPE has an error near 1.
LEAST_TOLERANCE = 1e-4
SMALL_PAIR = 1e-3  # share of the mean absolute channel that is added to a pair's length, because of rounding errors
LAST_TOKENS = 256
"""Number of last tokens of a prompt among which the token to measure with is chosen."""
UNTURNED = RopeFacts(frequencies=[], interleaved=False)


@torch.inference_mode()
def measure_rotations(model: PreTrainedModel, input_ids: torch.Tensor) -> dict[int, RopeFacts | None]:
    """Measure each layer's RoPE for a sequence of the prompt's length, by two forward passes over one token.

    The token runs at position 0 and at position N - 1. A layer's RoPE is the one of the model's sets of frequencies
    that predicts the second key from the first. A scale that all positions share, such as YaRN's, is not included.
    If the frequencies depend on the length of the sequence (dynamic, longrope), those for the prompt's length are
    returned.

    Args:
        input_ids: [N] int64, from whose last tokens the token is chosen.

    Returns:
        One entry per layer that attends; None if none of the model's rotary embeddings predicts the layer's keys.
    """
    last, token = len(input_ids) - 1, _loudest_token(model, input_ids[-LAST_TOKENS:])
    before, after = keys_of_one_token(model, token, 0), keys_of_one_token(model, token, last)
    # The frequencies are read after the second pass, because a pass may set them for the length of its sequence.
    candidates = [UNTURNED, *_rotary_embeddings(model)]
    return {layer: _explanation(before[layer], after[layer], last, candidates) for layer in sorted(before)}


def _loudest_token(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the token [1] of largest embedding, because a padding token's embedding, and so its keys, may be zeros."""
    ids: torch.Tensor = input_ids.unique().to(model.device)
    embedded = model.get_input_embeddings()(ids)
    return ids[embedded.float().norm(dim=-1).argmax()][None]


def _rotary_embeddings(model: PreTrainedModel) -> list[RopeFacts]:
    """List candidate RoPEs: each set of frequencies in the model's buffers, with both ways of pairing channels."""
    found = [
        RopeFacts(frequencies=buffer.float().tolist(), interleaved=interleaved)
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
        for interleaved in (False, True)
    ]
    return [rope for number, rope in enumerate(found) if rope not in found[:number]]


def _explanation(
    before: torch.Tensor, after: torch.Tensor, position: int, candidates: list[RopeFacts]
) -> RopeFacts | None:
    fitting = [rope for rope in candidates if 2 * len(rope.frequencies) <= before.shape[1]]
    misfits = [_misfit(before, after, position, rope) for rope in fitting]
    best = min(range(len(fitting)), key=misfits.__getitem__)
    tolerance = max(LEAST_TOLERANCE, 8 * torch.finfo(before.dtype).eps)
    return fitting[best] if misfits[best] <= tolerance else None


def _misfit(before: torch.Tensor, after: torch.Tensor, position: int, rope: RopeFacts) -> float:
    """Return the largest error of the predicted rotation of a pair of channels, relative to the pair's length.

    It is the maximum over all pairs, because a few large channels that hardly rotate would dominate a sum.
    """
    frequencies = torch.tensor(rope.frequencies, device=before.device)
    before, after = before.float(), after.float()
    expected = rotate(before, torch.full_like(before[:, 0], position), frequencies, rope.interleaved)
    lengths, distances = (
        _lengths(split_pairs(rows, len(frequencies), rope.interleaved)) for rows in (before, after - expected)
    )
    return float((distances / (lengths + SMALL_PAIR * before.abs().mean())).amax())


def _lengths(channels: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second, rest = channels
    return torch.cat([torch.hypot(first, second), rest.abs()], -1)
