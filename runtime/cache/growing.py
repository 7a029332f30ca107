"""Growable rows: the end can be rewritten or extended without copying the rows before it."""

import torch

LEAST_ROOM = 1024


class GrowingRows:
    """Rows [Hk, used, ...] at the front of a buffer, with free space for twice the rows added since the start.

    The free space does not depend on the length of the initial rows. A write copies only what is written, except for
    the few times when the buffer grows.

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
