"""Records of what each answer token attended to."""

from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad

from sparsekv.runtime.tracing.recorder import (
    MEASURES,
    MOST_CHOSEN,
    MOST_IN_MEAN,
    MOST_IN_RECORD,
    Largest,
    Reduced,
    largest,
    largest_passages,
)


@dataclass(frozen=True)
class TokenRecord:
    """Record of one answer token in L layers.

    Attributes:
        totals: [3 or 4, L, Hk], the results of `Shares.totals`.
        passages: the passages with the largest shares, for each layer and KV head.
        chosen, missed: the selected and the missed tokens with the largest shares, for each layer and KV head.
        mean: the K passages with the largest means of shares over layers and KV heads.
        measures: `MEASURES` [4, L, Hk] float64, NaN where unknown.
    """

    totals: torch.Tensor
    passages: Largest
    chosen: Largest
    missed: Largest | None
    mean: Largest
    measures: torch.Tensor


@dataclass
class TokenRecorder:
    """Records answer tokens one after another from the steps of `layers` layers, which arrive in order of layer.

    All layers of a token are recorded together, because on a CPU the time of a record depends on the number of
    operations.
    """

    layers: int
    middle: int
    tokens: list[TokenRecord] = field(default_factory=list)
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """Sums over answer tokens of the shares by passage [2 or 3, L, Hk, P]."""
    _steps: list[Reduced] = field(default_factory=list)

    def add(self, step: Reduced) -> None:
        """Add one layer's step; record the token when the steps of all layers have arrived."""
        self._steps.append(step)
        if len(self._steps) == self.layers:
            steps, self._steps = self._steps, []
            by_passage = torch.stack([one.by_passage for one in steps], 1)
            self.sums = self.sums + by_passage
            self.tokens.append(self._record(steps, by_passage))

    def _record(self, steps: list[Reduced], by_passage: torch.Tensor) -> TokenRecord:
        exact = torch.stack([one.shares.exact for one in steps])
        nowhere = torch.stack([one.shares.nowhere for one in steps])
        chosen, stood_for, *missed = by_passage.sum(-1)
        positions = _alike([one.shares.positions for one in steps], self.middle)
        weights = _alike([one.shares.chosen for one in steps], 0.0)
        return TokenRecord(
            totals=torch.stack([exact, chosen, stood_for + nowhere, *missed]),
            passages=largest_passages(by_passage, MOST_IN_RECORD),
            chosen=largest(weights, MOST_CHOSEN, positions),
            missed=_together([one.missed for one in steps if one.missed is not None]),
            mean=largest_passages(by_passage.mean((1, 2)), MOST_IN_MEAN),
            measures=self._measures(steps),
        )

    def _measures(self, steps: list[Reduced]) -> torch.Tensor:
        known = [one.measures for one in steps if one.measures is not None]
        if known:
            return torch.stack(known, 1)
        exact = steps[0].shares.exact
        read = torch.stack([torch.as_tensor(one.rows_read, device=exact.device).expand_as(exact) for one in steps])
        unknown = torch.full((len(MEASURES) - 1, *read.shape), torch.nan, dtype=torch.float64, device=exact.device)
        return torch.cat([unknown, read.double()[None] / (2 * self.middle)])


def _alike(rows: list[torch.Tensor], filler: float) -> torch.Tensor:
    """Stack the rows [Hk, R] of all layers to [L, Hk, R], padded with `filler` where a layer has fewer columns."""
    most = max(one.shape[1] for one in rows)
    return torch.stack([pad(one, (0, most - one.shape[1]), value=filler) for one in rows])


def _together(layers: list[Largest]) -> Largest | None:
    """Stack the places [Hk, K] of all layers to [L, Hk, K], and the shares likewise; return None for no layers."""
    if not layers:
        return None
    return Largest(torch.stack([one.places for one in layers]), torch.stack([one.shares for one in layers], 1))
