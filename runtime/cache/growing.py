"""Growable rows: the end can be rewritten or extended without copying the rows before it."""

import torch

LEAST_ROOM = 1024


class GrowingRows:
    """Rows [Hk, used, ...] at the front of a buffer.

    Before the first write the buffer is the given tensor, without free space. When it grows, it gets free space for
    twice the rows added so far, at least LEAST_ROOM; any other write copies only what is written.

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
        """Replace all rows from `start` on by rows [Hk, T, ...]."""
        end = start + rows.shape[1]
        if end > self.buffer.shape[1] or self.buffer.shape[1] == self.first:
            room = max(LEAST_ROOM, 2 * (end - self.first))
            grown = self.buffer.new_empty(len(rows), end + room, *rows.shape[2:])
            grown[:, :start] = self.buffer[:, :start]
            self.buffer = grown
        self.buffer[:, start:end] = rows
        self.used = end
