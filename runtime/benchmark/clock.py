"""Clocks for steps and memory copies: the wall clock on a CPU, CUDA events on a GPU.

Steps on a GPU are replayed as CUDA graphs if they can be captured.

With `cold=True` the hardware's caches are evicted before each run, because in a model other layers run between two
steps of a layer. For this the clock of a CPU reads 128 MiB. The clock of a GPU reads 256 MiB, or four times the L2
cache if that is more. With `cold=False` the caches still have the data of the previous run.
"""

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsekv.runtime.cache.buffers import Run, captured, waits

WARM_UPS = 3
CPU_EVICTED, CUDA_EVICTED = 2**27, 2**28  # bytes read to evict the caches; on a GPU at least four times the L2 cache
FREED = 2**25 - 2**16  # bytes of the block that `WallClock` frees; glibc ignores freed blocks of 32 MiB or more
CPU_COPIED, CUDA_COPIED = 2**27, 2**30  # bytes of the copy that measures bandwidth


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a step: mean, median and quartiles over the runs.

    `how` is `wall clock` on a CPU. On a GPU it is `graph` for replays of a CUDA graph, or `eager`. `output` is the
    output of the last run.
    """

    mean: float
    median: float
    lower: float
    upper: float
    how: str
    output: torch.Tensor

    @classmethod
    def of(cls, milliseconds: list[float], how: str, output: torch.Tensor) -> "Timing":
        lower, median, upper = statistics.quantiles(milliseconds, n=4, method="inclusive")
        return cls(statistics.fmean(milliseconds), median, lower, upper, how, output)


class Clock(ABC):
    """Times steps on one device.

    Args:
        runs: number of times that a step is timed, at least 2.
        cold: evict the caches before each run.
        evicted: number of bytes that are read to evict the caches.
    """

    def __init__(self, device: torch.device, runs: int, *, cold: bool, evicted: int):
        self.device, self.runs, self.cold = device, runs, cold
        # Ones, because pages of zeros may all map to one physical page. Eviction only reads this memory, because cache
        # lines that it had written would be written back during the timed step.
        self.scrap = torch.ones(evicted // 4 if cold else 1, device=device)

    def _evict(self) -> None:
        if self.cold:
            self.scrap.sum()

    @abstractmethod
    def time(self, step: Run, cycle: int = 1) -> Timing:
        """Time a step. A run is `cycle` calls, because some methods select only in every `cycle`-th step.

        The times are divided by `cycle`.
        """

    @abstractmethod
    def _milliseconds(self, run: Callable[[], object]) -> list[float]:
        """Measure the milliseconds of each of `self.runs` runs."""

    def bandwidth(self) -> float:
        """Measure the bandwidth in bytes per second: bytes read plus bytes written by a large copy on the device."""
        size = CUDA_COPIED if self.device.type == "cuda" else CPU_COPIED
        source = torch.arange(size // 8, device=self.device)
        target = torch.empty_like(source)
        for _ in range(WARM_UPS):
            target.copy_(source)
        taken = statistics.median(self._milliseconds(lambda: target.copy_(source)))
        return 2 * size / (taken / 1000)


def clock_for(device: torch.device, runs: int, *, cold: bool) -> Clock:
    return CudaClock(device, runs, cold=cold) if device.type == "cuda" else WallClock(device, runs, cold=cold)


class WallClock(Clock):
    """Times steps by the host's wall clock."""

    def __init__(self, device: torch.device, runs: int, *, cold: bool):
        super().__init__(device, runs, cold=cold, evicted=CPU_EVICTED)
        # glibc maps and unmaps a step's temporary memory in each run, until a block of this size has been freed. In a
        # process that has loaded a model such a block has been freed.
        torch.empty(FREED, dtype=torch.uint8, device=device)

    def time(self, step: Run, cycle: int = 1) -> Timing:
        run = _repeated(step, cycle)
        for _ in range(WARM_UPS):
            run()
        return Timing.of([ms / cycle for ms in self._milliseconds(run)], "wall clock", run())

    def _milliseconds(self, run: Callable[[], object]) -> list[float]:
        taken = []
        for _ in range(self.runs):
            self._evict()
            start = time.perf_counter()
            run()
            taken.append(1000 * (time.perf_counter() - start))
        return taken


class CudaClock(Clock):
    """Times replays of a step's CUDA graph by CUDA events.

    A step that synchronises with the GPU, or cannot be captured for another reason, runs eagerly. Its `Timing.how` is
    `eager`.
    """

    def __init__(self, device: torch.device, runs: int, *, cold: bool):
        if device.index is not None:
            torch.cuda.set_device(device)
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        super().__init__(device, runs, cold=cold, evicted=max(CUDA_EVICTED, 4 * cache))

    def time(self, step: Run, cycle: int = 1) -> Timing:
        run = _repeated(step, cycle)
        for _ in range(WARM_UPS):
            run()
        found = None if waits(run, self.device) else captured(run, self.device)
        if found is None:
            taken, how = self._milliseconds(run), "eager"
            return Timing.of([ms / cycle for ms in taken], how, run())
        graph, output = found
        taken = self._milliseconds(graph.replay)
        # The output is overwritten first, so that the returned output must come from the replay.
        output.fill_(torch.nan)
        graph.replay()
        return Timing.of([ms / cycle for ms in taken], "graph", output.clone())

    def _milliseconds(self, run: Callable[[], object]) -> list[float]:
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(self.runs)
        ]
        for start, stop in events:
            self._evict()
            start.record()
            run()
            stop.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) for start, stop in events]


def _repeated(step: Run, cycle: int) -> Run:
    def run() -> torch.Tensor:
        for _ in range(cycle - 1):
            step()
        return step()

    return run
