"""How each layer of a model turns its keys with their position, found by measuring the model itself.

One token attends to itself alone, so what enters a layer does not depend on where the token stands, and the layer's
keys at two positions differ by its rotation only. No architecture is named: what explains the difference is how it
turns.
"""

import torch
from transformers import PreTrainedModel

from sparsekv.formats.schema import RopeFacts
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.kernels.common.rotation import rotate, split_pairs

LEAST_TOLERANCE = 1e-4  # relative to a pair's length; a wrong rotation is off by its whole length somewhere
SMALL_PAIR = 1e-3  # of the mean channel: what is smaller may be lost in rounding
UNTURNED = RopeFacts(frequencies=[], interleaved=False)


@torch.inference_mode()
def measure_rotations(model: PreTrainedModel, input_ids: torch.Tensor) -> list[RopeFacts | None]:
    """How each layer turns its keys in a sequence as long as a prompt, by two forward passes over one token.

    A factor that all positions share, such as YaRN's, is no part of a rotation. Frequencies that depend on the length
    of a sequence (dynamic, longrope) are those of the prompt's.

    Args:
        input_ids: [N] int64; N - 1 is the position to measure at.

    Returns:
        one entry a layer, None where no rotary embedding of the model explains what the layer does.
    """
    last = len(input_ids) - 1
    before = _keys_of_one_token(model, input_ids[-1:], 0)
    after = _keys_of_one_token(model, input_ids[-1:], last)
    # Read only now: the pass before has made the frequencies those of its length.
    candidates = [UNTURNED, *_rotary_embeddings(model)]
    return [_explanation(before[layer], after[layer], last, candidates) for layer in sorted(before)]


def _keys_of_one_token(model: PreTrainedModel, input_ids: torch.Tensor, position: int) -> dict[int, torch.Tensor]:
    """Keys [Hk, D] of each layer for one token id [1] that stands alone at a position."""
    keys: dict[int, torch.Tensor] = {}

    def attend_to_itself(call: AttentionCall) -> torch.Tensor:
        keys[call.layer] = call.keys[:, 0]
        return call.values.repeat_interleave(len(call.query) // len(call.values), 0)

    ids = input_ids[None].to(model.device)
    with route_attention(model, attend_to_itself):
        model(input_ids=ids, position_ids=torch.full_like(ids, position), use_cache=False)
    return keys


def _rotary_embeddings(model: PreTrainedModel) -> list[RopeFacts]:
    """Both ways to pair channels for each set of frequencies that the model holds now."""
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
    """Largest distance of a pair of channels from where the rotation takes it, relative to its length.

    Pair by pair, as a few large channels that hardly turn would hide all others in a sum.
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
