"""CPU threads of a model's steps: as many as there are cores that other processes leave free.

The threads of an operation end together. Where another process has one's core, all others wait for it, at each of a
step's thousand operations.
"""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch
from transformers import PreTrainedModel, StoppingCriteria

from sparsekv.runtime.decoding.compiled import is_compiled

INTERVAL = 0.25
"""Seconds between two looks: the kernel counts in hundredths of a second."""

CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that fix the number of threads."""

COUNTERS = Path("/proc/stat")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
IDLE = (3, 4)
"""Columns of a core's line of /proc/stat, idle and waiting for a disk."""
COUNTED = 8
"""Columns that add up to all of a core's time: guests' are within the user's."""


@dataclass(frozen=True)
class Usage:
    """A moment, the seconds that some cores were busy until then, and those that this process had of any core."""

    moment: float
    busy: float
    own: float


def usage() -> Usage | None:
    """Now, of the cores that this process may use; None where the kernel does not tell."""
    try:
        text = COUNTERS.read_text()
    except OSError:
        return None
    own = os.times()
    return Usage(time.monotonic(), busy_seconds(text, os.sched_getaffinity(0)), own.user + own.system)


def busy_seconds(text: str, cores: set[int]) -> float:
    """Seconds that some cores were busy, by the text of /proc/stat; time that a hypervisor gave to others is busy."""
    ticks = 0
    for line in text.splitlines():
        name, *columns = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            ticks += sum(int(one) for place, one in enumerate(columns[:COUNTED]) if place not in IDLE)
    return ticks / os.sysconf("SC_CLK_TCK")


def quota(text: str) -> float:
    """The cores that a control group may use, by the text of its cpu.max; infinite without a limit."""
    most, _, period = text.strip().partition(" ")
    return math.inf if most == "max" else int(most) / int(period)


def left_free(before: Usage, now: Usage, cores: int) -> float:
    """How many of some cores other processes left free, on average, between two moments."""
    others = (now.busy - before.busy - (now.own - before.own)) / (now.moment - before.moment)
    return cores - max(0.0, others)


def threads_for(free: float, most: int) -> int:
    """How many of `most` threads there are free cores for: up to half a core is none, and one thread is the least."""
    return most if free >= most else max(1, math.ceil(free - 0.5))


class _Meter:
    """What the threads of this process share: the last look, and the number of threads before any of them lowered it.

    torch keeps one number for threads that are yet to begin, and one in each that has begun.
    """

    def __init__(self) -> None:
        self.lock, self.users, self.most = Lock(), 0, 1
        self.last, self.free = usage(), math.inf

    def enter(self) -> int:
        """Torch's own number of threads, until `leave`."""
        with self.lock:
            self.most = torch.get_num_threads() if not self.users else self.most
            self.users += 1
            return self.most

    def leave(self) -> None:
        with self.lock:
            self.users -= 1

    def threads(self, most: int) -> int:
        """How many of `most` there are cores for; looks again after `INTERVAL`."""
        with self.lock:
            if self.last is not None and time.monotonic() - self.last.moment >= INTERVAL and (now := usage()):
                self.free = min(left_free(self.last, now, len(os.sched_getaffinity(0))), _quota())
                self.last = now
            return threads_for(self.free, most)


def _quota() -> float:
    try:
        return quota(QUOTA.read_text())
    except OSError:
        return math.inf


_meter = _Meter()


class FreeCores:
    """Torch's threads in the thread that made it: `follow` sets them to those that there are cores for.

    Args:
        most: torch's own number, which is never exceeded; 1 to leave it as it is.
    """

    def __init__(self, most: int):
        self.most = self.threads = most

    def follow(self) -> None:
        """Set the number again, by a look that is at most `INTERVAL` old."""
        if self.most > 1 and (threads := _meter.threads(self.most)) != self.threads:
            self.threads = threads
            torch.set_num_threads(threads)

    def restore(self) -> None:
        if self.threads != self.most:
            torch.set_num_threads(self.most)


@contextmanager
def free_cores(model: PreTrainedModel) -> Iterator[FreeCores]:
    """Within the context torch's threads are those that there are cores for, and `follow` keeps them so.

    They stay as they are for a model on a GPU, for compiled steps, which are compiled for a number of threads, where
    the user has fixed it by `CHOSEN_BY_USER`, and where the kernel does not tell what others use.
    """
    fixed = model.device.type != "cpu" or is_compiled(model) or any(os.environ.get(one) for one in CHOSEN_BY_USER)
    most = _meter.enter()
    cores = FreeCores(1 if fixed else most)
    try:
        cores.follow()
        yield cores
    finally:
        cores.restore()
        _meter.leave()


class Following(StoppingCriteria):
    """Ends no answer: follows what cores are free, after each token of transformers' own loop."""

    def __init__(self, cores: FreeCores):
        self.cores = cores

    def __call__(self, input_ids: torch.Tensor, scores: object, **more: object) -> torch.Tensor:
        self.cores.follow()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
