"""How far rows lie from the centroids that stand for them: what a replacement loses of them."""

import math

import torch


def relative_spreads(rows: torch.Tensor, tensors: dict[str, torch.Tensor], name: str) -> list[float]:
    """Distance of rows from their clusters' centroids relative to that from the mean row, for each level, finest first.

    It is sqrt(sum |r - c|^2 / sum |r - mean|^2) over all KV heads, each with its own mean: 0 where all rows of a
    cluster are equal, 1 where the centroids say no more than the mean does. Its square is the share of the variance
    that is lost when a centroid stands for each row. Allocates a few copies of one head's rows in float32.

    Args:
        rows: [Hk, M, D] of the middle, in order of position.
        tensors: the artifact's, with token positions counted from the first middle token.
        name: of the centroids, levelI.NAME [Hk, C_I, D]; levels without them are left out.
    """
    levels = sum(key.endswith(f".{name}") for key in tensors)
    total, left = 0.0, [0.0] * levels
    for head, of_head in enumerate(rows if levels else ()):
        ordered = of_head[tensors["token_order"][head].long()].float()
        total += _square_sum(ordered - ordered.mean(0, dtype=torch.float64).float())
        counts = tensors["level0.counts"][head].long()
        labels = torch.arange(len(counts)).repeat_interleave(counts)
        for level in range(levels):
            if level:
                labels = tensors[f"level{level - 1}.parent"][head].long()[labels]
            left[level] += _square_sum(ordered - tensors[f"level{level}.{name}"][head].float()[labels])
    # Rows that are all the same lose nothing, whatever stands for them.
    return [math.sqrt(one / total) if total else 0.0 for one in left]


def _square_sum(rows: torch.Tensor) -> float:
    return float(rows.square().sum(dtype=torch.float64))
