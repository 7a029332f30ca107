"""Softmax with its log-sum-exp, and softmax of some logits beside others of known log-sum-exp.

On a CPU torch's `exp` and `logsumexp` take up to thirty times as long on values that underflow; its `softmax` does not.
"""

import torch


def softmax_with_logsumexp(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last axis, and the log-sum-exp, which is computed from the largest weight and its logit.

    Args:
        logits: [..., T] float32, in each row at least one that is not minus infinity.

    Returns:
        weights [..., T] and log-sum-exps [...].
    """
    weights = logits.softmax(-1)
    return weights, logits.amax(-1) - weights.amax(-1).log()


def softmax_beside(logits: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """Weights [..., T] of logits [..., T] in one softmax with other logits, whose log-sum-exp is `beside` [...].

    Allocates a copy of the logits.
    """
    return torch.cat([logits, beside[..., None]], -1).softmax(-1)[..., :-1]
