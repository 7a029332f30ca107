"""How much of the middle decode steps have read, counted where it is known without waiting for a device."""

import torch


class ReadRows:
    """Rows of size D that decode steps have read for the middle, summed over KV heads, and those dense would read.

    What depends on data is added on the device; what the host knows costs it nothing. Kernels add to `by_kernels` [Hk]
    int64, and each that they added counts as `per_count` rows. A captured step does not come by here when it is
    replayed: what it `add`ed while `deferred` counts once for each `advance`.
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
            rows: of each KV head, a number or [Hk, Q or 1].
            middle: rows that dense attention would read keys and values of.
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
        """Count what the last step read that the host knows of."""
        self.known += self._step[0]
        self.dense += self._step[1]

    def counters(self) -> tuple[torch.Tensor, ...]:
        """What a step changes on the device."""
        return self.counted, self.by_kernels

    def total(self) -> float:
        """Rows that were read; two syncs."""
        return float(self.counted) + self.known + self.per_count * int(self.by_kernels.sum())

    @torch.inference_mode()
    def reset(self) -> None:
        """Count from nothing again, in the same place: a captured step adds to it."""
        self.counted.zero_()
        self.by_kernels.zero_()
        self.known, self.dense = 0.0, 0
