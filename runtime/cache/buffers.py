"""Growable row buffers, counters of the rows that decode steps read, and CUDA graphs of the steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


class ReadRows:
    """Counts the D-sized rows that decode steps read, and the rows that dense attention would read.

    Rows of the tokens between sinks and tail (the middle) and of the index are counted, summed over KV heads. Counts
    that depend on data are summed on the device, and other counts on the host. Kernels add to `by_kernels` [Hk] int64,
    in which each count stands for `per_count` rows.

    A replayed CUDA graph does not run `add`. Therefore, while `deferred` is True, `add` only stores the host's count of
    a step, and the caller calls `advance` after each replay, to add this count to the totals.
    """

    def __init__(self, heads: int, device: torch.device):
        self.heads = heads
        self.counted = torch.zeros((), dtype=torch.float64, device=device)
        self.by_kernels = torch.zeros(heads, dtype=torch.int64, device=device)
        self.per_count, self.known, self.dense = 0, 0.0, 0
        self.deferred = False
        self.step = (0.0, 0)
        """The host's counts of the last step, or of the step that a CUDA graph replays: rows read, and dense rows."""

    def add(self, rows: torch.Tensor | float, middle: int) -> None:
        """Count one decode step.

        Args:
            rows: rows read per KV head, as a number or as [Hk, Q or 1].
            middle: number of tokens between sinks and tail, of which dense attention would read all keys and values.
        """
        known = 0.0
        if isinstance(rows, int | float):
            known = self.heads * rows
        else:
            self.counted += rows.sum()
        self.step = known, 2 * self.heads * middle
        if not self.deferred:
            self.advance()

    def advance(self) -> None:
        """Add the host's count of the last step to the totals."""
        self.known += self.step[0]
        self.dense += self.step[1]

    def counters(self) -> tuple[torch.Tensor, ...]:
        """Device tensors that a step changes."""
        return self.counted, self.by_kernels

    def total(self) -> float:
        """Return the number of rows read so far; one sync."""
        return total_read([self])

    @torch.inference_mode()
    def reset(self) -> None:
        """Set all counts to zero, in place, because CUDA graphs of steps add to the device tensors."""
        self.counted.zero_()
        self.by_kernels.zero_()
        self.known, self.dense = 0.0, 0


def read_share(read: float, dense: float, *, counted: bool) -> float:
    """Return the rows read divided by the rows that dense attention would have read; 0 before the first step.

    Args:
        counted: whether any layer counts rows. If not, all layers are dense, and the share is 1.
    """
    if not counted:
        return 1.0
    return read / dense if dense else 0.0


def total_read(reads: Sequence[ReadRows]) -> float:
    """Return the number of rows that the counters `reads` have counted so far; one sync per device."""
    each: dict[torch.device, list[torch.Tensor]] = {}
    for read in reads:
        on_device = read.counted + read.per_count * read.by_kernels.sum()
        each.setdefault(on_device.device, []).append(on_device)
    return sum(read.known for read in reads) + sum(float(torch.stack(counts).sum()) for counts in each.values())


Run = Callable[[], torch.Tensor]


def waits(run: Run, device: torch.device) -> bool:
    """Run a step once, and return whether the step makes the host wait for the GPU.

    A step that waits raises a RuntimeError here. Every RuntimeError counts as waiting, except torch.OutOfMemoryError,
    which is raised.
    """
    torch.cuda.synchronize(device)
    try:
        torch.cuda.set_sync_debug_mode("error")
        run()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def captured(
    run: Run, device: torch.device, warm_up: Run | None = None
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor] | None:
    """Capture a step as a CUDA graph; return the graph and its output tensor, or None if the capture fails.

    Raises torch.OutOfMemoryError if the capture fails for lack of memory, and any error of the warm-up.

    Args:
        run: runs the step and returns its output.
        warm_up: called once before the capture; None: `run` is called.
    """
    side, here = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        (warm_up or run)()
    here.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # The mode is thread_local, because a prefetch thread may synchronise during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = run()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return None
    return graph, output


@dataclass(frozen=True)
class ModelGraph:
    """A CUDA graph of a model's decode step, its logits [B, V], and the cache's `buffers()` at the time of capture.

    The logits are for B sequences and V tokens of the vocabulary. `counts` has `ReadRows.step` of each counter.
    """

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    buffers: tuple[int, ...]
    counts: tuple[tuple[float, int], ...]


LEAST_ROOM = 1024


class GrowingRows:
    """Rows [Hk, used, ...] at the front of a buffer.

    Before the first write, the buffer is the given tensor, without free space. The first write, and each write that
    does not fit, copies the rows to a new buffer. The new buffer has free space for twice the rows added so far, and
    for at least LEAST_ROOM rows. Any other write copies only the written rows.

    Args:
        rows: [Hk, T, ...], not copied before the first write.
    """

    def __init__(self, rows: torch.Tensor):
        self.buffer, self.used, self.first = rows, rows.shape[1], rows.shape[1]

    @property
    def rows(self) -> torch.Tensor:
        """The used rows [Hk, used, ...], as a view of the buffer."""
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
