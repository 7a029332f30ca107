"""A softmax with its denominator, or with more in it than is asked for.

On a CPU torch's `exp` and `logsumexp` take up to thirty times as long on what underflows; its `softmax` does not.
"""

import torch


def softmax_with_logsumexp(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last axis and the log-sum-exp that it divides by.

    The largest weight tells the denominator.

    Args:
        logits: [..., T] float32, of which one at least is not minus infinity.

    Returns:
        [..., T] and [...].
    """
    weights = logits.softmax(-1)
    return weights, logits.amax(-1) - weights.amax(-1).log()


def softmax_beside(logits: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """The weights [..., T] of logits [..., T] in a softmax with more, whose log-sum-exp is `beside` [...].

    Allocates a copy of the logits.
    """
    return torch.cat([logits, beside[..., None]], -1).softmax(-1)[..., :-1]
