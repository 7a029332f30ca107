"""What earlier versions wrote, which today's must not read as its own."""

import torch


def in_blocks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A context's tensors in 8 bits with the names, shapes and dtypes of the form in which 64 tokens' keys shared a
    scale and an offset for each channel."""
    heads, tokens, channels = tensors["keys"].shape
    of_block = torch.ones(heads, -(-tokens // 64), channels, dtype=torch.bfloat16)
    kept = {name: tensors[name] for name in ("keys", "values", "value_scales")}
    return kept | {"key_scales": of_block, "key_offsets": of_block.clone()}
