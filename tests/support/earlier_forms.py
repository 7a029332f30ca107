"""Tensors in formats of earlier versions, which this version must not read as its own."""

import torch


def in_blocks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a context's int8 tensors in an earlier format, in which the keys of 64 tokens share a scale and an offset
    for each channel."""
    heads, tokens, channels = tensors["keys"].shape
    of_block = torch.ones(heads, -(-tokens // 64), channels, dtype=torch.bfloat16)
    kept = {name: tensors[name] for name in ("keys", "values", "value_scales")}
    return kept | {"key_scales": of_block, "key_offsets": of_block.clone()}
