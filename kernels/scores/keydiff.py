"""KeyDiff's scores (arXiv 2504.15364): keys that differ most from the others, whatever is asked."""

import torch
from torch.nn.functional import normalize


def keydiff_scores(keys: torch.Tensor) -> torch.Tensor:
    """Minus the cosine of each key and the anchor, the mean of the normalised keys.

    Args:
        keys: [Hk, T, D].

    Returns:
        [Hk, T] float32. Allocates the keys in float32 once more.
    """
    directions = normalize(keys.float(), dim=-1)
    anchor = normalize(directions.mean(1, keepdim=True), dim=-1)
    return -(directions @ anchor.transpose(1, 2))[..., 0]
