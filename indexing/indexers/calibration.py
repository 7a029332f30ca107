"""The curve of score threshold against share of tokens kept, from which the threshold for any target is read."""

import torch

LOWEST = -60.0
BINS = 6000
POINTS = torch.logspace(-3, 0, 61, dtype=torch.float64)


class KeepCurve:
    """Accumulates cluster scores over layers, heads and queries, weighted by the tokens of each cluster.

    Stores a histogram of log2 scores in steps of 0.01, so its size does not grow with the context.
    """

    def __init__(self) -> None:
        self.weight = torch.zeros(BINS, dtype=torch.float64)
        self.tokens = 0.0

    def add(self, scores: torch.Tensor, counts: torch.Tensor, tokens: float) -> None:
        """Add scores [Hk, Q, C] of clusters with counts [Hk, Q or 1, C]; every query selects from `tokens` tokens."""
        bins = _bins(scores)
        weights = counts.expand_as(scores).double()
        # On the scores' device, as there may be millions. Atomics do no harm: whole numbers sum the same in any order.
        added = torch.zeros(BINS, dtype=torch.float64, device=scores.device)
        self.weight += added.scatter_add_(0, bins.flatten(), weights.flatten()).cpu()
        self.tokens += tokens * scores.shape[0] * scores.shape[1]

    def threshold(self, keep: float) -> float:
        """The threshold at which clusters of at least that score have the share `keep` of all tokens; 0 keeps all."""
        kept = self.weight.flip(0).cumsum(0) / self.tokens
        passed = int(torch.searchsorted(kept, torch.tensor(keep, dtype=torch.float64)))
        # The lowest bin also has all smaller scores, so only a threshold of 0 keeps all of its clusters.
        return 0.0 if passed >= BINS - 1 or keep >= 1 else 2.0 ** (LOWEST + (BINS - 1 - passed) * (-LOWEST / BINS))

    def share_above(self, threshold: float) -> float:
        """The share of all tokens in clusters that score at least `threshold`."""
        first = 0 if threshold <= 0 else int(_bins(torch.tensor([threshold])))
        return float(self.weight[first:].sum()) / self.tokens

    def points(self) -> list[list[float]]:
        """[[share kept, threshold], ...], shares rising from 0.001 to 1."""
        return [[keep, self.threshold(keep)] for keep in POINTS.tolist()]


def _bins(scores: torch.Tensor) -> torch.Tensor:
    logs = scores.double().clamp(min=2.0**LOWEST).log2()
    return ((logs - LOWEST) * (BINS / -LOWEST) + 1e-6).long().clamp(0, BINS - 1)
