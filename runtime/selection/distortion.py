"""Quantisation distortion: how far rows lie from the centroids that represent them."""

import math

import torch


def relative_spreads(rows: torch.Tensor, tensors: dict[str, torch.Tensor], name: str) -> list[float]:
    """Distance of rows to their clusters' centroids, relative to their distance to the mean, per level, finest first.

    It is sqrt(sum |r - c|^2 / sum |r - mean|^2) over all KV heads, each with its own mean: 0 where all rows of a
    cluster are equal, 1 where centroids are no better than the mean. Its square is the share of the variance that is
    lost when each row is replaced by its centroid. Allocates a few copies of one head's rows in float32.

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
        labels = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        for level in range(levels):
            if level:
                labels = tensors[f"level{level - 1}.parent"][head].long()[labels]
            left[level] += _square_sum(ordered - tensors[f"level{level}.{name}"][head].float()[labels])
    # No variance: all rows are equal, so that their centroids lose nothing.
    return [math.sqrt(one / total) if total else 0.0 for one in left]


def cluster_spreads(keys: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """[Hk, C] float64: the distance of each finest cluster's keys to its centroid, relative as in `relative_spreads`.

    Its square, averaged over a head's keys, is that of the head's spread; 0 for a cluster without keys.

    Args:
        keys: [Hk, M, D] of the middle, in order of position.
        tensors: the artifact's, with token positions counted from the first middle token.
    """
    spreads = []
    for head, of_head in enumerate(keys):
        ordered = of_head[tensors["token_order"][head].long()].float()
        counts = tensors["level0.counts"][head].long()
        labels = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        apart = (ordered - tensors["level0.centroids"][head].float()[labels]).square().sum(-1, dtype=torch.float64)
        sums = torch.zeros(len(counts), dtype=torch.float64, device=counts.device).index_add(0, labels, apart)
        mean = sums / counts.clamp(min=1)
        total = _square_sum(ordered - ordered.mean(0, dtype=torch.float64).float()) / max(1, len(ordered))
        spreads.append((mean / total).sqrt() if total else torch.zeros_like(mean))
    return torch.stack(spreads)


def _square_sum(rows: torch.Tensor) -> float:
    return float(rows.square().sum(dtype=torch.float64))
