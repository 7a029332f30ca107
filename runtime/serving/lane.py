"""A lane: the requests over one index with one config, and the engine that answers them together."""

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
"""Maximum number of tokens of questions in a step beside running answers."""
SHARE = 0.25
"""Share of a GPU's free memory, or of a machine's memory, that is planned for the keys and values of a lane's questions
and answers when it is opened."""
GROWTH = 2
"""Their buffers have up to this many times the rows that are used, because they double when they grow."""
OWN_TOKENS = 2048
"""Number of tokens of a question and its answer for which a lane has memory at least; it has fewer slots otherwise."""


class Lane:
    """The requests over one index with one config, and the engine that answers them together.

    All methods are called in the scheduler's thread. `slots` is the maximum number of requests that decode together;
    1 if the config does not let requests share steps. While `drains` is true, no requests get a slot. `document_bytes`
    are those that the document's keys and values take while the lane is open.
    """

    def __init__(self, index: OpenIndex, config: DecodeConfig, slots: int, store: TurnStore):
        self.index, self.config, self.slots, self.store = index, config, slots, store
        self.jobs: list[Job] = []
        self.engine: Engine | None = None
        self.running: dict[Sequence, Job] = {}
        self.drains, self.used, self.own_bytes = False, 0.0, 0
        self.document_bytes = index.document_bytes
        self._rewinds, self._most_slots = 0, slots

    def open(self, make_cache: Callable[[OpenIndex, DecodeConfig], IndexCache], planned: int) -> Exception | None:
        """Make the engine; return the error if that fails.

        Args:
            planned: bytes that other lanes plan for the keys and values of their questions and answers.
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
        """Answer two tokens to the document's last one, so that the first request finds all that is made once."""
        assert self.engine is not None
        last = Request(self.index.input_ids[-1:], Sampling(max_new_tokens=2))
        with exclusive(self.index.model), self.engine.running():
            self.engine.waiting.append(self.engine.sequence(last))
            while not self.engine.run_step():
                pass

    def close(self) -> None:
        """Free the engine and the rows that are kept for it."""
        if self.engine is not None and self.engine.turns is not None:
            self.engine.turns.forget()
        self.engine, self.running, self.drains, self.own_bytes = None, {}, False, 0

    def admit(self) -> bool:
        """Give free slots to requests; return whether there is work for a step."""
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
        """Run a step, and more as long as `goes_on` returns True and there is work.

        A failure ends the requests that take part; it is returned.
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
        """End the requests that take part in steps, or all if none does, with an error; close the engine."""
        jobs = list(self.running.values()) or list(self.jobs)
        self.close()
        for job in jobs:
            job.fail(error)


def _without_tensors(error: Exception) -> Exception:
    """Remove the traceback of an error for want of memory, because its frames hold tensors."""
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
