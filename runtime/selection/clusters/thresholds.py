"""Calibrated thresholds: maps the share of tokens to keep to a score threshold."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Thresholds:
    """An indexer's calibration of one lookup: for decoding, and for a question's prefill, where scores are flatter."""

    calibration: dict[str, Any]
    lookup: str

    def __post_init__(self) -> None:
        """Raises ValueError, KeyError or TypeError for a malformed calibration, which comes from a manifest."""
        for joint in (False, True):
            found = self._of(joint)
            kept, thresholds = np.array(found["curve"], dtype=float).T
            coarse = np.array(found["coarse_thresholds"], dtype=float)
            finite = all(np.isfinite(numbers).all() for numbers in (kept, thresholds, coarse))
            if coarse.ndim != 1 or not finite or (kept <= 0).any() or not (thresholds > 0).any():
                raise ValueError("a calibration curve is no list of shares and thresholds")

    def coarse(self, depth: int, *, joint: bool) -> float:
        """Threshold of a coarse level: depth 1 is the coarsest. `joint`: for a question's prefill."""
        return float(self._of(joint)["coarse_thresholds"][depth - 1])

    def finest(self, share: float, *, joint: bool) -> float:
        """Threshold for a target share, interpolated between calibrated points on log axes; 0 for share 1 or more."""
        if share >= 1:
            return 0.0
        kept, thresholds = np.array(self._of(joint)["curve"]).T
        known = thresholds > 0
        return float(np.exp(np.interp(np.log(share), np.log(kept[known]), np.log(thresholds[known]))))

    def _of(self, joint: bool) -> dict[str, Any]:
        found: dict[str, Any] = self.calibration["prefill" if joint else "decode"][self.lookup]
        return found
