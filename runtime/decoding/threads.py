"""CPU threads of a model's steps, linear layers for few tokens by all cores, and one thread at a time in a model."""

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
from transformers import PreTrainedModel, StoppingCriteria

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.kernels.common.hook import all_alone, alone, called_back
from sparsekv.kernels.common.mask import UnsupportedAttentionError
from sparsekv.runtime.decoding.compiled import is_compiled

WORTH_IT = 1 << 16
"""Weights of a layer from which on a second core saves more than it takes to hand work to it."""

GAIN = 1.8
"""How many times as fast the split must be for torch's product to be replaced: it is three times, or half as fast."""

FEW = 4
"""Rows up to which it makes a step faster: one by half or more, four by a tenth, eight not at all."""

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of plain weights: others may be quantised, or sharded over ranks."""


class FewRowsLinear(TorchFunctionMode):
    """Within it, a float32 layer's product with few rows is split among torch's threads, by the layer's outputs.

    On AMD's processors MKL multiplies few rows on one core, which cannot read memory as fast as all of them: of two, a
    third as fast. On Intel's it takes all of them. What is no such product is computed as without it.
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
    """The context for a model's steps; nothing on a GPU, where torch's compiler has them, or where torch's own product
    is as fast. Not to be held while a generator waits: it is the thread's."""
    split = model.device.type == "cpu" and not is_compiled(model) and split_pays(torch.get_num_threads())
    return FewRowsLinear() if split else nullcontext()


@cache
def split_pays(threads: int) -> bool:
    """Whether this machine's processor multiplies few rows faster when they are split among so many threads.

    Measured, once, on 4 MiB of weights in some 2 ms: what MKL does depends on the processor and on its own version.
    """
    if threads == 1:
        return False
    weight, row = torch.ones(-(-1024 // threads) * threads, 1024), torch.ones(1, 1024)
    whole, split = _fastest(lambda: linear(row, weight), lambda: _in_parts(row, weight, None, threads))
    return whole > GAIN * split


def _fastest(*products: Callable[[], torch.Tensor]) -> list[float]:
    """Seconds of the fastest of eight of each, taken in turn: what else runs disturbs them alike."""
    best = [inf] * len(products)
    for _ in range(8):
        for number, product in enumerate(products):
            started = perf_counter()
            product()
            best[number] = min(best[number], perf_counter() - started)
    return best


def _parts(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    """Into how many equal parts the outputs are split; 1 for what is left to torch."""
    if type(weight) not in PLAIN or weight.numel() < WORTH_IT or weight.dim() != 2:
        return 1
    few = rows.shape[-1:] == weight.shape[1:] and 0 < rows.numel() <= FEW * weight.shape[1]
    fits = weight.device.type == "cpu" and weight.is_contiguous()
    if not few or not fits or any(one is not None and one.dtype != torch.float32 for one in (rows, weight, bias)):
        return 1
    return max(parts for parts in range(1, torch.get_num_threads() + 1) if len(weight) % parts == 0)


def _in_parts(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: int) -> torch.Tensor:
    # As transposed rows: with other strides, which mean the same, MKL takes four times as long.
    columns = rows.reshape(-1, weight.shape[1]).t().expand(parts, -1, -1)
    product = torch.bmm(weight.view(parts, -1, weight.shape[1]), columns).view(len(weight), -1)
    outputs = product.t().reshape(*rows.shape[:-1], -1)
    return outputs if bias is None else outputs + bias


@contextmanager
def exclusive(model: PreTrainedModel) -> Iterator[None]:
    """Within the context other threads that ask the model wait; this one may enter it again.

    Raises:
        UsageError: an answer's own callback asks, of this model or of another: two threads whose callbacks ask each
            other's model would wait for ever.
        SparsekvError: the model attends in a way that no index can follow, as other code of it may since the build.
    """
    _refuse_callback()
    with alone(model):
        try:
            yield
        except UnsupportedAttentionError as error:
            raise SparsekvError(str(error)) from error


@contextmanager
def exclusive_process() -> Iterator[None]:
    """Within the context other threads that ask any model wait. Raises what `exclusive` raises."""
    _refuse_callback()
    with all_alone():
        yield


def _refuse_callback() -> None:
    if called_back():
        raise UsageError(
            "an index was asked or opened by on_text or stop, within an answer; do it when that answer has come back"
        )


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
    """State that this process's threads share: the last measurement, and torch's thread count before it was lowered.

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
        """Return the number of threads to use: at most `most`, and no more than cores are idle.

        Measures again after `INTERVAL`."""
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
        """Set the number of threads again, by a measurement that is at most `INTERVAL` old."""
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
