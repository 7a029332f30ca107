"""A lane: the requests over one index with one config, and the engine that answers these requests together."""

import os
import time
from collections.abc import Callable

import torch

from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.attention.sparse_layer import divides_questions
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.kept_turns import KeptTurns, TurnStore
from sparsekv.runtime.decoding.engine import Engine, NotFiniteError, Request, Sequence, pack, why_alone
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.sampling import Sampling
from sparsekv.runtime.decoding.threads import exclusive
from sparsekv.runtime.serving.job import Job
from sparsekv.runtime.serving.submission import Finish

CHUNK = 512
"""Maximum number of question tokens in a step, if questions can be prefilled in several steps."""
SHARE = 0.25
"""Fraction of the memory that a lane reserves, when it opens, for the keys and values of its questions and answers.

The memory is the GPU's free memory, or on the CPU the machine's memory, minus what other open lanes have reserved.
"""
GROWTH = 2
"""Maximum ratio of a buffer's rows to its used rows: a buffer of keys or values doubles when it grows."""
OWN_TOKENS = 2048
"""Number of question and answer tokens for which each slot must have memory.

Less memory gives a lane fewer slots, but at least one, whatever its memory.
"""


class Lane:
    """The requests over one index with one config, and the engine that answers these requests together.

    All methods are called in the scheduler's thread. `waiting` is read in any thread, with the scheduler's lock. A lane
    is open while it has an engine, whose cache has the document's keys and values.

    Attributes:
        slots: maximum number of requests that decode together; 1 if the config does not let requests share steps.
        jobs: the lane's requests; `running` are those that have a slot.
        drains: while this is true, no request gets a slot, so that the lane can be closed.
        used: clock reading after the last step.
        own_bytes: bytes reserved for the keys and values of questions and answers; 0 in a lane that is not open.
        document_bytes: bytes of the document's keys and values in an open lane.
    """

    def __init__(self, index: OpenIndex, config: DecodeConfig, slots: int, store: TurnStore):
        self.index, self.config, self.slots, self.store = index, config, slots, store
        self.jobs: list[Job] = []
        self.engine: Engine | None = None
        self.running: dict[Sequence, Job] = {}
        self.drains, self.used, self.own_bytes = False, 0.0, 0
        self.document_bytes = index.document_bytes
        self._rewinds, self._most_slots = 0, slots

    @property
    def waiting(self) -> int:
        """Number of requests without a slot. In an open lane that does not drain, requests get free slots at once."""
        if self.engine is None or self.drains:
            return sum(job.sequence is None for job in self.jobs)
        return max(0, len(self.jobs) - self.slots)

    def open(self, make_cache: Callable[[OpenIndex, DecodeConfig], IndexCache], planned: int) -> Exception | None:
        """Make the engine; return the error if this fails, and None otherwise.

        Args:
            make_cache: makes the cache of an index for a config.
            planned: bytes that other lanes have reserved for the keys and values of their questions and answers.
        """
        try:
            with exclusive(self.index.model):
                self.engine = self._engine(make_cache(self.index, self.config), planned)
        except Exception as error:
            return _without_tensors(error)
        return None

    def _engine(self, cache: IndexCache, planned: int) -> Engine:
        alone, row = bool(why_alone(self.index, self.config.attention, cache)), GROWTH * _row_bytes(cache)
        self.own_bytes = max(0, int(SHARE * (_memory(self.index.device) - planned)))
        self.slots = 1 if alone else min(self._most_slots, max(1, self.own_bytes // (OWN_TOKENS * row)))
        own_tokens = self.own_bytes // (self.slots * row)
        if alone:
            return Engine(self.index, cache, chunk=CHUNK, own_tokens=own_tokens)
        divided = divides_questions(cache.stored_layers) and not cache.states.kinds.keeping
        turns = KeptTurns(self.store, divided=divided)
        return Engine(self.index, pack(cache, self.slots), chunk=CHUNK, turns=turns, own_tokens=own_tokens)

    def warm_up(self) -> None:
        """Generate two tokens after the document's last token. Kernels and buffers are then ready for the requests."""
        assert self.engine is not None
        last = Request(self.index.input_ids[-1:], Sampling(max_new_tokens=2))
        with exclusive(self.index.model), self.engine.running():
            self.engine.waiting.append(self.engine.sequence(last))
            while not self.engine.run_step():
                pass

    def close(self) -> None:
        """Free the engine, and the copies of keys and values of its ended requests."""
        if self.engine is not None and self.engine.turns is not None:
            self.engine.turns.forget()
        self.engine, self.running, self.drains, self.own_bytes = None, {}, False, 0

    def admit(self) -> bool:
        """Give free slots to requests; return whether there is work for a step.

        A request that the engine refuses ends with the engine's error.
        """
        if self.engine is None:
            return False
        for job in [one for one in self.jobs if one.sequence is None]:
            if self.drains or len(self.running) == self.slots:
                break
            try:
                job.sequence = self.engine.sequence(job.engine_request())
            except Exception as error:
                job.fail(error)
                continue
            self.engine.waiting.append(job.sequence)
            self.running[job.sequence] = job
        return bool(self.running)

    def run(self, goes_on: Callable[[], bool]) -> Exception | None:
        """Run one step, then more steps while `goes_on` returns True and there is work.

        An error ends the running requests and closes the engine. It is returned; None: there was no error.
        """
        assert self.engine is not None
        try:
            with exclusive(self.index.model), self.engine.running() as cores:
                while True:
                    cores.follow()
                    self._step(self.engine)
                    if not self.admit() or not goes_on():
                        break
        except Exception as error:
            self.fail(_without_tensors(error))
            return error
        self.used = time.monotonic()
        return None

    def _step(self, engine: Engine) -> None:
        if engine.cache.rewinds != self._rewinds:
            engine.recount()
        for sequence, answer in engine.run_step():
            job = self.running.pop(sequence)
            if isinstance(answer, NotFiniteError):
                job.fail(answer)
            else:
                job.finish(answer)
        self._rewinds = engine.cache.rewinds

    def end(self, job: Job, reason: Finish) -> None:
        """End a request before its next step."""
        if job.sequence is None or self.engine is None:
            job.finish(None, reason)
            return
        try:
            answer = self.engine.drop(job.sequence)
        except Exception as error:
            self.fail(_without_tensors(error))
            return
        del self.running[job.sequence]
        job.finish(answer, reason)

    def fail(self, error: Exception) -> None:
        """End the running requests with an error, or all requests if none is running; close the engine."""
        jobs = list(self.running.values()) or list(self.jobs)
        self.close()
        for job in jobs:
            job.fail(error)


def _without_tensors(error: Exception) -> Exception:
    """Remove the traceback of an out-of-memory error, because the frames of the traceback refer to tensors."""
    return error.with_traceback(None) if isinstance(error, torch.OutOfMemoryError) else error


def _memory(device: torch.device) -> int:
    """Return the bytes of a GPU's free memory, or of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _row_bytes(cache: IndexCache) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    rows = [one for layer in cache.stored_layers for one in (layer.keys, layer.values)]
    return sum(one.shape[0] * one.shape[2] * one.element_size() for one in rows)
