"""Rotary position embeddings (arXiv 2104.09864): rotating rows by their positions, and undoing it."""

import torch


def rotate(rows: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rows rotated by the given positions; negative positions undo a rotation.

    Args:
        rows: [..., T, D].
        positions: [..., T] int64; missing leading dimensions are broadcast.
        frequencies: [P] float32, radians per position of each pair of channels; 2 P at most D.
        interleaved: pairs are channels 2 i and 2 i + 1, else i and i + P; channels from 2 P on are not rotated.

    Returns:
        [..., T, D] float32. Allocates two more of this size.
    """
    # Angles in float32, as in models, so that undoing a model's rotation uses the same rounded angle.
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = split_pairs(rows.float(), len(frequencies), interleaved)
    turned = first * cos - second * sin, second * cos + first * sin
    pairs = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([pairs, rest], -1)


def split_pairs(rows: torch.Tensor, pairs: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views: first and second channels [..., P] of the pairs that `rotate` rotates, and the rest [..., D - 2 P]."""
    turned, rest = rows[..., : 2 * pairs], rows[..., 2 * pairs :]
    if interleaved:
        return turned[..., 0::2], turned[..., 1::2], rest
    return turned[..., :pairs], turned[..., pairs:], rest
