"""Rows with room behind them, whose end can be written anew without copying what comes before."""

import torch

LEAST_ROOM = 1024


class GrowingRows:
    """Rows [Hk, used, ...] at the front of a buffer that grows by twice the rows that came after the first ones.

    So a long context costs little room, and writing costs what is written, but for a few copies of the whole.

    Args:
        rows: [Hk, T, ...], not copied before the first write.
    """

    def __init__(self, rows: torch.Tensor):
        self.buffer, self.used, self.first = rows, rows.shape[1], rows.shape[1]

    @property
    def rows(self) -> torch.Tensor:
        """[Hk, used, ...], a view."""
        return self.buffer[:, : self.used]

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Let rows [Hk, T, ...] be the last ones, from row `start` on."""
        end = start + rows.shape[1]
        if end > self.buffer.shape[1] or self.buffer.shape[1] == self.first:
            room = max(LEAST_ROOM, 2 * (end - self.first))
            grown = self.buffer.new_empty(len(rows), end + room, *rows.shape[2:])
            grown[:, :start] = self.buffer[:, :start]
            self.buffer = grown
        self.buffer[:, start:end] = rows
        self.used = end
