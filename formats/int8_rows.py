"""Keys and values in 8 bits: whole numbers from -127 to 127, with what they are multiplied by and added to.

Keys have a few channels of large values, often around a mean far from zero, that change slowly from token to token
(KIVI, arXiv 2402.02750, section 3.2). So keys have a scale and an offset for each head, channel and block of KEY_BLOCK
tokens, as there. Values have no such channels: theirs is a scale for each head and token, and unlike there no offset.
docs/reference/eight-bits.md has what other forms lose.
"""

from collections.abc import Mapping

import torch

KEY_BLOCK = 64  # tokens whose keys share scales and offsets; counted from the prompt's first token
LARGEST = 127  # so that a number and its negative are both there
PIECE = 128 * KEY_BLOCK  # tokens that are converted at a time, by way of float32
SCALES = ("key_scales", "key_offsets", "value_scales")
"""Names of the tensors beside `keys` and `values`, all bfloat16: 2 bytes, with the range of float32."""

Tensors = Mapping[str, torch.Tensor]


def quantise(keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Keys and values [Hk, N, D], finite and of any floating dtype, in 8 bits, on their device.

    Each number is off by at most half its scale. Needs the memory of the result and of PIECE tokens in float32.

    Returns:
        keys, values [Hk, N, D] int8; key_scales, key_offsets [Hk, B, D] for B blocks of tokens, of which the last may
        be shorter; value_scales [Hk, N].
    """
    pieces = [_quantise_piece(*some) for some in zip(keys.split(PIECE, 1), values.split(PIECE, 1), strict=True)]
    return {name: torch.cat([piece[name] for piece in pieces], 1) for name in pieces[0]}


def row_bytes(channels: int) -> float:
    """Bytes of a token's keys or values of one head, with what they share of scales: the larger of the two."""
    return channels + max(2.0, 4.0 * channels / KEY_BLOCK)


def joined(first: Tensors, then: Tensors) -> dict[str, torch.Tensor]:
    """The tensors of `quantise` for tokens that follow one another, of which the first fill whole blocks."""
    return {name: torch.cat([first[name].to(rows.device), rows], 1) for name, rows in then.items()}


def first_tokens(tensors: Tensors, tokens: int) -> dict[str, torch.Tensor]:
    """The tensors of the first tokens alone, a multiple of KEY_BLOCK."""
    in_blocks = {"key_scales", "key_offsets"}
    return {name: rows[:, : tokens // KEY_BLOCK if name in in_blocks else tokens] for name, rows in tensors.items()}


def restore(
    numbers: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Rows [Hk, T, D] of a dtype that numbers [Hk, T, D] mean, with scales and offsets that broadcast to them.

    Finite if scales and offsets are: what rounding took beyond the dtype's largest number becomes that.
    """
    # Exact but for the sum, so that a GPU, which may multiply and add at once, gives the same bits as a CPU.
    rows = numbers.float() * scales.float()
    if offsets is not None:
        rows += offsets.float()
    largest = torch.finfo(dtype).max
    return rows.clamp_(-largest, largest).to(dtype)


def _quantise_piece(keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    tokens = keys.shape[1]
    # Repetitions of the last token fill its block and leave the range of its numbers as it is.
    filling = keys[:, -1:].expand(-1, -tokens % KEY_BLOCK, -1)
    blocks = torch.cat([keys, filling], 1).float().unflatten(1, (-1, KEY_BLOCK))
    offsets = _bfloat16(blocks.amin(2) / 2 + blocks.amax(2) / 2)
    blocks -= offsets.float()[:, :, None]
    key_scales, value_scales = _scales(blocks, 2), _scales(values.float(), 2)
    return {
        "keys": _rounded(blocks, key_scales[:, :, None]).flatten(1, 2)[:, :tokens],
        "values": _rounded(values.float(), value_scales[..., None]),
        "key_scales": key_scales,
        "key_offsets": offsets,
        "value_scales": value_scales,
    }


def _scales(rows: torch.Tensor, axis: int) -> torch.Tensor:
    """bfloat16 scales with which the largest number along an axis is LARGEST."""
    return _bfloat16(rows.abs().amax(axis) / LARGEST)


def _bfloat16(rows: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(torch.bfloat16).max
    return rows.clamp(-largest, largest).to(torch.bfloat16)


def _rounded(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    # Where the scale is 0 all numbers are 0, or too small for any scale.
    divisors = torch.where(scales == 0, 1.0, scales.float())
    return (rows / divisors).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
