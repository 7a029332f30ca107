"""Turning rows by their positions, as rotary embeddings do it (arXiv 2104.09864), and back."""

import torch


def rotate(rows: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rows turned by so many positions; negative positions undo it.

    Args:
        rows: [..., T, D].
        positions: [..., T] int64, broadcast over the dimensions that it lacks.
        frequencies: [P] float32, radians a position of each pair of channels; 2 P at most D.
        interleaved: pairs are channels 2 i and 2 i + 1, else i and i + P; channels from 2 P on stay as they are.

    Returns:
        [..., T, D] float32. Allocates them two times over.
    """
    # In float32, as models do it: what a model turned by a rounded angle is turned back by the same one.
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = split_pairs(rows.float(), len(frequencies), interleaved)
    turned = first * cos - second * sin, second * cos + first * sin
    pairs = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([pairs, rest], -1)


def split_pairs(rows: torch.Tensor, pairs: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First and second channels [..., P] of the pairs that `rotate` turns, and the others [..., D - 2 P]: views."""
    turned, rest = rows[..., : 2 * pairs], rows[..., 2 * pairs :]
    if interleaved:
        return turned[..., 0::2], turned[..., 1::2], rest
    return turned[..., :pairs], turned[..., pairs:], rest
