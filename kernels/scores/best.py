"""The highest of some scores."""

import numpy as np
import torch


def best_tokens(scores: torch.Tensor, tokens: int) -> torch.Tensor:
    """Indices [..., K] int64 of the highest of scores [..., M] float32, in any order.

    On a CPU numpy finds them, by introselect; torch's topk sorts, and takes five times as long from 32,768 on.
    """
    if scores.device.type != "cpu":
        return scores.topk(tokens, -1).indices
    left_out = scores.shape[-1] - tokens
    return torch.from_numpy(np.argpartition(scores.numpy(), left_out, axis=-1)[..., left_out:])
