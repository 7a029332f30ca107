"""Long lists of numbers as text: small binary columns in base64, which `assets/bytes.js` reads back exactly."""

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DIGITS, DECADES = 4, 7
ONE, NONE, OTHER = 63_001, 65_534, 65_535
"""Codes beside that of 0, which is 0, and of 1e-7 to 0.9999 with four significant digits, which are 1 to 63,000."""


def whole_column(values: Sequence[int]) -> dict[str, str]:
    """Whole numbers from 0 in as many bytes each as the largest needs: 1, 2 or 4, little-endian."""
    array = np.asarray(values, np.int64)
    size = next(size for size in (1, 2, 4) if array.max(initial=0) < 1 << 8 * size)
    return {"type": f"u{size}", "data": _base64(array.astype(f"<u{size}"))}


def share_column(values: Sequence[float | None]) -> dict[str, str]:
    """Shares in two bytes each where they are rounded to four digits; others as float64 aside, in order; None stays."""
    array = np.asarray([np.nan if value is None else value for value in values], np.float64)
    codes = np.where(np.isnan(array), NONE, OTHER).astype("<u2")
    for decade in range(DECADES):
        scale = 10.0 ** (DIGITS + decade)
        digits = np.rint(array * scale)
        same = (digits / scale == array) & (digits >= 1000) & (digits < 10_000)
        codes[same] = 1 + 9000 * decade + digits[same].astype(int) - 1000
    codes[array == 0], codes[array == 1] = 0, ONE
    return {"type": "share", "data": _base64(codes), "others": _base64(array[codes == OTHER].astype("<f8"))}


def _base64(array: NDArray[np.generic]) -> str:
    return base64.b64encode(array.tobytes()).decode()
