"""KeyDiff's scores (arXiv 2504.15364): high for keys that differ most from the others, whatever the query."""

import torch
from torch.nn.functional import normalize


def keydiff_scores(keys: torch.Tensor) -> torch.Tensor:
    """Minus the cosine between each key and the anchor, which is the mean of the normalised keys.

    Args:
        keys: [Hk, T, D].

    Returns:
        [Hk, T] float32. Allocates a float32 copy of the keys.
    """
    directions = normalize(keys.float(), dim=-1)
    anchor = normalize(directions.mean(1, keepdim=True), dim=-1)
    return -(directions @ anchor.transpose(1, 2))[..., 0]
