"""Counts the rows that decode steps read, on the host or on the device, without a sync per step."""

from collections.abc import Sequence

import torch


class ReadRows:
    """D-sized rows that decode steps read for the middle, summed over KV heads, and rows dense attention would read.

    Counts that depend on data are summed on the device, the others on the host. Kernels add to `by_kernels` [Hk]
    int64, where each count stands for `per_count` rows. A replayed CUDA graph does not run `add`: while `deferred`,
    `add` only records the host's part of a step, and each `advance` counts it once.
    """

    def __init__(self, heads: int, device: torch.device):
        self.counted = torch.zeros((), dtype=torch.float64, device=device)
        self.by_kernels = torch.zeros(heads, dtype=torch.int64, device=device)
        self.per_count, self.known, self.dense = 0, 0.0, 0
        self.deferred = False
        self._step = (0.0, 0)

    def add(self, rows: torch.Tensor | float, middle: int) -> None:
        """Count one decode step.

        Args:
            rows: rows read per KV head, a number or [Hk, Q or 1].
            middle: number of middle tokens, whose keys and values dense attention would read.
        """
        heads, known = len(self.by_kernels), 0.0
        if isinstance(rows, int | float):
            known = heads * rows
        else:
            self.counted += rows.sum()
        self._step = known, 2 * heads * middle
        if not self.deferred:
            self.advance()

    def advance(self) -> None:
        """Add the host's part of the last step."""
        self.known += self._step[0]
        self.dense += self._step[1]

    def counters(self) -> tuple[torch.Tensor, ...]:
        """The device tensors that a step changes."""
        return self.counted, self.by_kernels

    def total(self) -> float:
        """All rows read so far; one sync."""
        return total_read([self])

    @torch.inference_mode()
    def reset(self) -> None:
        """Set all counts to zero, in place, because captured steps add to these tensors."""
        self.counted.zero_()
        self.by_kernels.zero_()
        self.known, self.dense = 0.0, 0


def read_share(read: float, dense: float, *, counted: bool) -> float:
    """Rows that were read over those that dense attention would have read; 0 before the first step.

    Args:
        counted: False for dense layers alone, which count nothing and read everything.
    """
    if not counted:
        return 1.0
    return read / dense if dense else 0.0


def total_read(reads: Sequence[ReadRows]) -> float:
    """All rows that layers have read so far; one sync for each device that they are on."""
    each: dict[torch.device, list[torch.Tensor]] = {}
    for read in reads:
        on_device = read.counted + read.per_count * read.by_kernels.sum()
        each.setdefault(on_device.device, []).append(on_device)
    return sum(read.known for read in reads) + sum(float(torch.stack(counts).sum()) for counts in each.values())
