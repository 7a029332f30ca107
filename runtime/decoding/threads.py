"""CPU threads: number of threads of a model's steps, linear layers split among all cores, exclusive use of a model."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.kernels.common.hook import all_alone, alone, called_back, has_lost_threads
from sparsekv.kernels.common.mask import UnsupportedAttentionError
from sparsekv.runtime.decoding.compiled import is_compiled

WORTH_IT = 1 << 16
"""Minimum number of weights in a layer that is split among cores. In smaller layers starting a second core costs more
time than it saves."""

GAIN = 1.8
"""Minimum speedup of the split product at which it replaces torch's product.

Measured speedups are about 3 or about 0.5, depending on the processor.
"""

FEW = 4
"""Maximum number of rows for which the split product is used.

The split product makes a step with one row faster by half or more, with four rows by a tenth, with eight rows not at
all.
"""

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of plain weights; weights of other types may be quantised, or sharded over ranks."""


class FewRowsLinear(TorchFunctionMode):
    """Within this mode, a float32 linear layer with few input rows is split among torch's threads, by its outputs.

    On AMD processors MKL multiplies few rows on a single core, which cannot read memory as fast as several cores. With
    two cores MKL's product is a third as fast as the split product. On Intel processors MKL uses all cores. The mode
    does not change other operations.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is linear and not kwargs and len(args) == 3 and (parts := _parts(*args)) > 1:
            return _in_parts(*args, parts)
        return func(*args, **(kwargs or {}))


def all_cores(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Return the context for a model's steps: `FewRowsLinear` on a CPU that multiplies faster with split layers.

    The context does nothing on a GPU, for compiled steps, or if torch's own product is as fast. It applies to the whole
    thread, so a generator must not hold it across a yield.
    """
    split = model.device.type == "cpu" and not is_compiled(model) and split_pays(torch.get_num_threads())
    return FewRowsLinear() if split else nullcontext()


@cache
def split_pays(threads: int) -> bool:
    """Whether this machine multiplies few rows faster if the layer is split among `threads` threads.

    The function measures once per process and number of threads, on 4 MiB of weights in about 2 ms, because MKL's
    behaviour depends on the processor and on MKL's version. With one thread there is nothing to measure.
    """
    if threads == 1:
        return False
    weight, row = torch.ones(-(-1024 // threads) * threads, 1024), torch.ones(1, 1024)
    whole, split = _fastest(lambda: linear(row, weight), lambda: _in_parts(row, weight, None, threads))
    return whole > GAIN * split


def _fastest(*products: Callable[[], torch.Tensor]) -> list[float]:
    """Return for each product the seconds of its fastest of eight runs.

    The products run in turn, so that other load disturbs them equally.
    """
    best = [inf] * len(products)
    for _ in range(8):
        for number, product in enumerate(products):
            started = perf_counter()
            product()
            best[number] = min(best[number], perf_counter() - started)
    return best


def _parts(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    """Return the number of equal parts to split the outputs into; 1 leaves the product to torch."""
    if type(weight) not in PLAIN or weight.numel() < WORTH_IT or weight.dim() != 2:
        return 1
    few = rows.shape[-1:] == weight.shape[1:] and 0 < rows.numel() <= FEW * weight.shape[1]
    fits = weight.device.type == "cpu" and weight.is_contiguous()
    if not few or not fits or any(one is not None and one.dtype != torch.float32 for one in (rows, weight, bias)):
        return 1
    return max(parts for parts in range(1, torch.get_num_threads() + 1) if len(weight) % parts == 0)


def _in_parts(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int) -> torch.Tensor:
    # The input is passed as transposed rows: with other, equivalent strides MKL takes four times as long.
    columns = rows.reshape(-1, weight.shape[1]).t().expand(parts, -1, -1)
    product = torch.bmm(weight.view(parts, -1, weight.shape[1]), columns).view(len(weight), -1)
    outputs = product.t().reshape(*rows.shape[:-1], -1)
    return outputs if bias is None else outputs + bias


@contextmanager
def exclusive(model: PreTrainedModel) -> Iterator[None]:
    """Hold exclusive use of a model within the context; other threads wait, and this thread may enter again.

    A callback may use no model, because two threads whose callbacks ask each other's model would deadlock.

    Raises:
        UsageError: the caller is a callback of an answer, or this process is a fork in which no model can run.
        SparsekvError: the model attends in a way that no index supports, for example because its code has changed
            since the build.
    """
    refuse_callback()
    refuse_fork()
    with alone(model):
        try:
            yield
        except UnsupportedAttentionError as error:
            raise SparsekvError(str(error)) from error


@contextmanager
def exclusive_process() -> Iterator[None]:
    """Hold exclusive use of all models within the context; other threads wait.

    Raises:
        UsageError: the caller is a callback of an answer, or this process is a fork in which no model can run.
    """
    refuse_callback()
    refuse_fork()
    with all_alone():
        yield


def refuse_fork() -> None:
    """Raise UsageError in a forked process that would wait for threads that only its parent has."""
    if has_lost_threads():
        raise UsageError(
            "this process was forked after its parent had used a model, and torch's threads do not run in a fork; "
            "start it by `multiprocessing.get_context('spawn')` and open the index there, or start the parent with "
            "OMP_NUM_THREADS=1 and fork while no answer is decoded"
        )


def refuse_callback() -> None:
    """Raise UsageError if the caller is a callback of an answer, by any model."""
    if called_back():
        raise UsageError(
            "a callback (on_token, on_text or stop) asked a question, read a stream or opened an index in the middle "
            "of an answer; do that after the answer has been returned"
        )


INTERVAL = 0.25
"""Minimum seconds between two readings of CPU use, because the kernel counts in hundredths of a second."""

CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that fix the number of threads."""

COUNTERS = Path("/proc/stat")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
IDLE = (3, 4)
"""Columns of a core's line in /proc/stat that count idle time and time spent waiting for a disk."""
COUNTED = 8
"""Number of columns that add up to a core's total time. Later columns count guests, whose time is in the user time."""


@dataclass(frozen=True)
class Usage:
    """CPU use up to the clock reading `moment`.

    `busy` is the number of seconds for which a set of cores was busy since the system started, summed over the cores.
    `own` is the number of CPU seconds of this process.
    """

    moment: float
    busy: float
    own: float


def usage() -> Usage | None:
    """Return the use so far of the cores that this process may use; None if /proc/stat cannot be read."""
    try:
        text = COUNTERS.read_text()
    except OSError:
        return None
    own = os.times()
    return Usage(time.monotonic(), busy_seconds(text, os.sched_getaffinity(0)), own.user + own.system)


def busy_seconds(text: str, cores: set[int]) -> float:
    """Return the seconds for which the given cores were busy, from the text of /proc/stat.

    Time that a hypervisor gave to other guests counts as busy.
    """
    ticks = 0
    for line in text.splitlines():
        name, *columns = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            ticks += sum(int(one) for place, one in enumerate(columns[:COUNTED]) if place not in IDLE)
    return ticks / os.sysconf("SC_CLK_TCK")


def quota(text: str) -> float:
    """Return the number of cores that a control group may use, from the text of its cpu.max; infinity if unlimited."""
    most, _, period = text.strip().partition(" ")
    return math.inf if most == "max" else int(most) / int(period)


def left_free(before: Usage, now: Usage, cores: int) -> float:
    """Return the mean number of the `cores` cores that other processes left free between two readings of CPU use."""
    others = (now.busy - before.busy - (now.own - before.own)) / (now.moment - before.moment)
    return cores - max(0.0, others)


def threads_for(free: float, most: int) -> int:
    """Return the number of threads for `free` free cores: at least 1 and at most `most`.

    A fraction of up to half a core is rounded down, and a larger fraction up.
    """
    return most if free >= most else max(1, math.ceil(free - 0.5))


class _Meter:
    """State that all threads of this process share: the last reading of CPU use, and torch's original thread count.

    `last` is that reading, and `free` is the number of cores that other processes left free before the reading. `users`
    is the number of `free_cores` contexts that are open. `most` is torch's thread count before the first of these
    contexts changed it. It is stored here, because a context in one thread changes the count with which new threads
    begin.
    """

    def __init__(self) -> None:
        self.lock, self.users, self.most = Lock(), 0, 1
        self.last, self.free = usage(), math.inf

    def enter(self) -> int:
        """Register a user of torch's threads until `leave`; return torch's thread count before any user changed it."""
        with self.lock:
            self.most = torch.get_num_threads() if not self.users else self.most
            self.users += 1
            return self.most

    def leave(self) -> None:
        with self.lock:
            self.users -= 1

    def threads(self, most: int) -> int:
        """Return the number of threads to use: the number of free cores, rounded, at least 1 and at most `most`.

        A CPU quota limits the number of free cores. CPU use is read again if the last reading is older than
        `INTERVAL`.
        """
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


def restart_meter() -> None:
    """Start a new reading of CPU use, for a process that was forked long before its work begins."""
    global _meter
    _meter = _Meter()


class FreeCores:
    """Limits torch's thread count, in the thread that made this object, to the number of free cores.

    Args:
        most: torch's own thread count, which is the maximum; 1: never change the count.
    """

    def __init__(self, most: int):
        self.most = self.threads = most

    def follow(self) -> None:
        """Set the thread count from the last reading of CPU use. A reading older than `INTERVAL` is renewed."""
        if self.most > 1 and (threads := _meter.threads(self.most)) != self.threads:
            self.threads = threads
            torch.set_num_threads(threads)

    def restore(self) -> None:
        if self.threads != self.most:
            torch.set_num_threads(self.most)


@contextmanager
def free_cores(model: PreTrainedModel) -> Iterator[FreeCores]:
    """Within the context, torch uses at most as many threads as cores are free; `follow` updates the thread count.

    The thread count stays unchanged for a model on a GPU, and for compiled steps, which have a fixed thread count. It
    also stays unchanged if the user has set a variable of `CHOSEN_BY_USER`, or if the kernel does not report the use of
    cores.
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
