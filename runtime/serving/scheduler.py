"""The scheduler: continuous batching of requests over several open indices of one model."""

import atexit
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from threading import Condition, Thread

import torch

from sparsekv.formats.errors import UsageError, choose_one
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.kept_turns import TurnStore
from sparsekv.runtime.decoding.answer import answer_room
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.threads import exclusive, refuse_callback
from sparsekv.runtime.serving.lane import Job, Lane, check_stops
from sparsekv.runtime.serving.stream import QueueFullError, Stream, Submission, refuse_fork

KEPT_BYTES = 256 << 20
SLICE = 0.1
"""Seconds after which the scheduler lets other threads use the model."""
PAUSE = 0.0005
"""Seconds that the scheduler sleeps after each time slice, without the model's lock, so that others can take it."""
LONGEST_WAIT = 60.0
"""Upper bound, in seconds, on the estimate of the time until the queue has room."""
_running: set["Scheduler"] = set()
"""Schedulers whose thread runs."""


@dataclass(frozen=True)
class Measures:
    """Current numbers of waiting and running requests, and totals since the scheduler was made.

    Attributes:
        answers, answer_tokens: number of ended answers, and of their tokens.
        prompt_tokens, cached_tokens: sums over the ended answers of the numbers of the same names in `Usage`.
        kept_bytes: bytes of the copies of ended requests' keys and values.
        kv_fraction: mean number of key, value and index rows that a decode step read, divided by the number that dense
            attention would read; 0 before the first decode step.
    """

    waiting: int
    running: int
    answers: int
    answer_tokens: int
    prompt_tokens: int
    cached_tokens: int
    kept_bytes: int
    kv_fraction: float


def _new_cache(index: OpenIndex, config: DecodeConfig) -> IndexCache:
    return index.cache(config)


class Scheduler:
    """Answers requests over several open indices of one model by continuous batching, in a thread of its own.

    A lane has the requests with the same index and config, which share steps. Lanes take turns, one step each. The
    thread starts with the first request and ends when no request is left.

    Args:
        indices: open indices by name; all of the same model.
        slots: maximum number of requests that decode together over one index with one config.
        queue: maximum number of requests that wait for a slot. Requests whose lane is not open yet count as waiting.
        kept_bytes: maximum bytes of copies of ended requests' keys and values, for the next turns of conversations.
        lanes: maximum number of lanes whose caches are in memory.
        memory: maximum bytes of the documents' keys and values in these caches; None: no limit. A single cache may be
            larger. If another cache would exceed one of these two limits, the least recently used cache without running
            requests is freed first.
        make_cache: makes the cache of an index for a config; by default `OpenIndex.cache`.
    """

    def __init__(
        self,
        indices: Mapping[str, OpenIndex],
        *,
        slots: int = 16,
        queue: int = 64,
        kept_bytes: int = KEPT_BYTES,
        lanes: int = 8,
        memory: int | None = None,
        make_cache: Callable[[OpenIndex, DecodeConfig], IndexCache] = _new_cache,
    ):
        self.slots, self.queue, self.most_lanes, self.make_cache = slots, queue, lanes, make_cache
        self.memory = inf if memory is None else memory
        self._indices: dict[str, OpenIndex] = {}
        self._changed = Condition()
        """Lock of the fields below, which several threads read and change.

        Notified when a request has ended, and when no request is left and the thread ends.
        """
        self._lanes: list[Lane] = []
        self._jobs: dict[Job, Lane] = {}
        self._thread: Thread | None = None
        self._closed = False
        self._process: int | None = None
        """Id of the process that submitted the first request. Torch's threads do not run in a fork of that process."""
        self._turns = TurnStore(kept_bytes)
        self._answers, self._answer_tokens, self._prompt_tokens, self._cached_tokens = 0, 0, 0, 0
        self._read, self._steps, self._seconds = 0.0, 0, 1.0
        for name, index in indices.items():
            self.add(name, index)

    def add(self, name: str, index: OpenIndex) -> None:
        """Serve another index. An index of the same name is replaced; requests over the replaced index still finish.

        Raises:
            UsageError: the index has another model than the served indices.
        """
        with self._changed:
            if any(one.model is not index.model for one in self._indices.values()):
                raise UsageError(
                    f"{name} has another model than the other indices that are served; serve it by another server"
                )
            self._indices[name] = index
            self._close_unused_at_rest()

    def remove(self, name: str) -> None:
        """Stop serving an index. Requests over it that are already submitted are answered; then its memory is freed."""
        with self._changed:
            self._indices.pop(name, None)
            self._close_unused_at_rest()

    def warm_up(self, name: str, config: DecodeConfig) -> None:
        """Make the cache of an index for a config, if there is room, and generate two tokens with the cache.

        Call this method before the first request. Raises the errors of `make_cache`.
        """
        lane = self._lane(self._indices[name], config)
        if not self._has_room(lane):
            self._lanes.remove(lane)
        elif (error := lane.open(self.make_cache, self._planned())) is not None:
            self._lanes.remove(lane)
            raise error
        else:
            lane.warm_up()

    def is_asked(self, index: OpenIndex) -> bool:
        """Whether requests over an index wait or are being answered."""
        with self._changed:
            return any(lane.index is index for lane in self._jobs.values())

    def submit(self, request: Submission) -> Stream:
        """Queue a request; return the stream of its answer. Raises the errors of `submit_all`."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[Submission]) -> list[Stream]:
        """Queue several requests, or none of them if an error is raised; return the streams of their answers.

        All of the requests are accepted if the queue has room for at least one request.

        Raises:
            QueueFullError: the queue is full.
            UsageError: there is no index of this name. A request has no tokens, or tokens that the model does not
                have. Its timeout, `logprobs` or a stop string is not valid. No position of the model is left for an
                answer. The scheduler is closed. The caller is a callback of an answer. Or this process is a fork of one
                that has submitted requests.
        """
        refuse_callback()
        self._process = self._process or os.getpid()
        refuse_fork(self._process)
        indices = [self._index(one) for one in requests]
        with self._changed:
            if self._closed:
                raise UsageError("this server is shutting down; ask another server, or start this one again")
            if self._waiting() >= self.queue:
                raise QueueFullError(self._retry_after())
            jobs = [Job(one, index, self._ended) for one, index in zip(requests, indices, strict=True)]
            for job in jobs:
                self._jobs[job] = lane = self._lane(job.index, job.request.config)
                lane.jobs.append(job)
            if self._thread is None:
                # A daemon, because Python waits for other threads before it calls the functions of `atexit`.
                self._thread = Thread(target=self._run, name="sparsekv-serving", daemon=True)
                _running.add(self)
                self._thread.start()
        return [Stream(job.channel) for job in jobs]

    def _index(self, request: Submission) -> OpenIndex:
        """Return the index of a request. Raises UsageError if there is none, and the errors of `_check`."""
        if (index := self._indices.get(request.index)) is None:
            remedy = choose_one(request.index, self._indices) if self._indices else "add it before it is asked"
            raise UsageError(f"there is no index {request.index}; {remedy}")
        _check(index, request)
        return index

    def close(self, drain: float) -> bool:
        """Refuse new requests, wait up to `drain` seconds for accepted requests, cancel the rest, and free the caches.

        A second call from another thread, with a shorter `drain`, shortens the wait of the first call.

        Returns:
            Whether all requests ended without being cancelled.
        """
        with self._changed:
            self._closed = True
            completed = self._changed.wait_for(lambda: not self._jobs, drain)
            for job in self._jobs:
                job.channel.cancelled = True
            self._changed.wait_for(lambda: self._thread is None)
            self._lanes.clear()
            self._turns.forget()
            return completed

    def measures(self) -> Measures:
        with self._changed:
            return Measures(
                waiting=self._waiting(),
                running=len(self._jobs) - self._waiting(),
                answers=self._answers,
                answer_tokens=self._answer_tokens,
                prompt_tokens=self._prompt_tokens,
                cached_tokens=self._cached_tokens,
                kept_bytes=self._turns.nbytes,
                kv_fraction=self._read / self._steps if self._steps else 0.0,
            )

    def _waiting(self) -> int:
        return sum(lane.waiting for lane in self._lanes)

    def _retry_after(self) -> float:
        """Estimate the seconds until a request ends, from the durations of earlier requests."""
        running = len(self._jobs) - self._waiting()
        return min(max(1.0, self._seconds / max(1, running)), LONGEST_WAIT)

    def _lane(self, index: OpenIndex, config: DecodeConfig) -> Lane:
        for lane in self._lanes:
            if lane.index is index and lane.config == config:
                return lane
        self._lanes.append(Lane(index, config, self.slots, self._turns))
        return self._lanes[-1]

    def _ended(self, job: Job) -> None:
        """Remove a request that has ended from its lane, and count the request unless it failed."""
        with self._changed:
            self._jobs.pop(job).jobs.remove(job)
            if (usage := job.usage) is not None:
                self._answers += 1
                self._answer_tokens += usage.answer_tokens
                self._prompt_tokens += usage.prompt_tokens
                self._cached_tokens += usage.cached_tokens
                if usage.kv_fraction is not None:
                    self._read, self._steps = self._read + usage.kv_fraction * usage.steps, self._steps + usage.steps
                self._seconds += 0.2 * (time.monotonic() - job.submitted - self._seconds)
            self._changed.notify_all()

    def _run(self) -> None:
        """Answer requests until no request is left."""
        try:
            while self._goes_on():
                self._open_lanes()
                self._take_turns()
                time.sleep(PAUSE)
        except BaseException as error:
            with self._changed:
                self._lanes, self._thread, jobs = [], None, list(self._jobs)
                _running.discard(self)
            for job in jobs:
                job.fail(error)
            raise

    def _goes_on(self) -> bool:
        """End requests that are cancelled or whose timeout has passed; return whether any requests are left.

        If none are left, the thread counts as ended.
        """
        self._end_due()
        with self._changed:
            self._close_unused()
            if not self._jobs:
                self._thread = None
                _running.discard(self)
                self._changed.notify_all()
            return bool(self._jobs)

    def _end_due(self) -> None:
        with self._changed:
            due = [(job, lane, reason) for job, lane in self._jobs.items() if (reason := job.due()) is not None]
        for job, lane, reason in due:
            lane.end(job, reason)

    def _close_unused(self) -> None:
        """Remove each lane that has no requests and no engine, or no requests and an index that is no longer served."""
        served = {id(index) for index in self._indices.values()}
        for lane in [one for one in self._lanes if not one.jobs]:
            if lane.engine is None or id(lane.index) not in served:
                lane.close()
                self._lanes.remove(lane)

    def _close_unused_at_rest(self) -> None:
        """Call `_close_unused` if the thread does not run. A running thread calls `_close_unused` itself."""
        if self._thread is None:
            self._close_unused()

    def _open_lanes(self) -> None:
        """Open the lanes that have requests, the longest-waiting lane first; close idle lanes to make room.

        There is a lane for each index and config. If no lane is idle, the lane that was opened first gets no new
        requests, so that it becomes idle and can be closed. A lane is not closed in the call that opens it, because its
        requests get their slots later.
        """
        draining = self._open_while_room()
        with self._changed:
            for lane in self._lanes:
                lane.drains = lane is draining

    def _open_while_room(self) -> Lane | None:
        """Open lanes as `_open_lanes` does; return the lane that has to drain before the next one can be opened."""
        with self._changed:
            closed = [lane for lane in self._lanes if lane.engine is None and lane.jobs]
        for lane in sorted(closed, key=lambda one: one.jobs[0].submitted):
            while not self._has_room(lane):
                opened = [one for one in self._lanes if one.engine is not None and one not in closed]
                idle = [one for one in opened if not one.running]
                if not idle:
                    return next(iter(opened), None)
                self._close(min(idle, key=lambda one: one.used))
            self._open(lane)
        return None

    def _has_room(self, lane: Lane) -> bool:
        """Whether a lane can be opened beside the open lanes. A lane can always be opened if no lane is open."""
        opened = [one.document_bytes for one in self._lanes if one.engine is not None]
        return not opened or (len(opened) < self.most_lanes and sum(opened) + lane.document_bytes <= self.memory)

    def _open(self, lane: Lane) -> None:
        """Open a lane; if the memory does not suffice, close all idle lanes and try again.

        If the lane cannot be opened, its requests end with the error.
        """
        error = lane.open(self.make_cache, self._planned())
        if isinstance(error, torch.OutOfMemoryError):
            self._free_memory()
            error = lane.open(self.make_cache, self._planned())
        if error is not None:
            lane.fail(error)
            return
        with self._changed:  # the lane becomes the last in the list, because open lanes are in the order of opening
            self._lanes.remove(lane)
            self._lanes.append(lane)

    def _planned(self) -> int:
        return sum(lane.own_bytes for lane in self._lanes)

    def _free_memory(self) -> None:
        for lane in [one for one in self._lanes if one.engine is not None and not one.running]:
            self._close(lane)
        self._turns.forget()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _close(self, lane: Lane) -> None:
        lane.close()
        with self._changed:
            if not lane.jobs:
                self._lanes.remove(lane)

    def _take_turns(self) -> None:
        """Run steps of the lanes (one per index and config) in turn, until the time is up or a new lane has work."""
        model = next(iter(self._lanes)).index.model
        with exclusive(model), route_attention(model, _attend_to_nothing):  # each lane routes to its own cache
            until = time.monotonic() + SLICE
            while True:
                self._end_due()
                lanes = [lane for lane in self._lanes if lane.admit()]
                for lane in lanes:
                    error = lane.run(partial(self._goes_on_with, lane, until) if len(lanes) == 1 else _one_step)
                    if isinstance(error, torch.OutOfMemoryError):
                        self._free_memory()
                if not lanes or time.monotonic() >= until or self._new_lanes():
                    return

    def _goes_on_with(self, lane: Lane, until: float) -> bool:
        """Whether a lane runs another step: no other lane has requests, no request is due, `until` has not passed."""
        with self._changed:
            alone = all(one is lane for one in self._jobs.values())
            return alone and time.monotonic() < until and not any(job.due() for job in self._jobs)

    def _new_lanes(self) -> bool:
        with self._changed:
            return any(lane.engine is None and lane.jobs for lane in self._lanes)


@atexit.register
def _end_running() -> None:
    """Cancel all requests and wait until the threads have ended their step, when the interpreter exits.

    An interpreter that exits while a thread runs torch's code is aborted. Therefore Ctrl-C does not end the wait.
    """
    while here := [one for one in list(_running) if one._process == os.getpid()]:
        with suppress(KeyboardInterrupt):
            here[0].close(0)


def _one_step() -> bool:
    return False


def _attend_to_nothing(call: AttentionCall) -> torch.Tensor:
    raise RuntimeError("the model runs outside a lane's step")


def _check(index: OpenIndex, request: Submission) -> None:
    """Raise UsageError for a request that cannot be answered."""
    tokens = request.tokens
    if tokens.dim() != 1 or not len(tokens) or tokens.dtype != torch.int64:
        raise UsageError("a request has no tokens after the document; ask a question")
    if not index.knows(tokens):
        raise UsageError("the question has token ids that the model does not have; make them with its tokenizer")
    if request.timeout is not None and not request.timeout > 0:
        raise UsageError(f"a timeout of {request.timeout} s: give more than 0")
    if request.logprobs is not None and request.logprobs < 0:
        raise UsageError(f"log-probabilities of {request.logprobs} tokens: give 0 or more")
    if request.stop:
        check_stops(index, request.stop)
    answer_room(index, index.split.tokens + len(tokens))
