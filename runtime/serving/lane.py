"""A lane: the requests over one index with one config, and the engine that answers these requests together.

A request's job has callbacks for the engine, stop strings, and delivered pieces of the answer.
"""

import json
import os
import time
from collections.abc import Callable

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.attention.sparse_layer import divides_questions
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.kept_turns import KeptTurns, TurnStore
from sparsekv.runtime.decoding.answer import Answer, Sampling
from sparsekv.runtime.decoding.engine import Engine, NotFiniteError, Request, Sequence, TokenLogprobs, pack, why_alone
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.threads import exclusive
from sparsekv.runtime.serving.stream import Channel, Finish, Piece, Submission, Usage


class StoppedText:
    """The text of an answer up to the first stop string.

    The end of the text is not delivered as long as it may be the beginning of a stop string.
    """

    def __init__(self, stops: tuple[str, ...]):
        self.stops, self.found, self._held = stops, False, ""

    def put(self, text: str) -> str:
        """Append text; return the text that can be delivered now."""
        if self.found:
            return ""
        self._held += text
        places = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
        self.found = bool(places)
        end = min(places) if places else len(self._held) - self._may_begin()
        out, self._held = self._held[:end], "" if places else self._held[end:]
        return out

    def would_stop(self, text: str) -> bool:
        """Whether the undelivered text would have a stop string if `text` followed it."""
        return any(stop in self._held + text for stop in self.stops)

    def end(self) -> str:
        """Return the text that has not been delivered."""
        out, self._held = self._held, ""
        return out

    def _may_begin(self) -> int:
        """Return the length of the longest end of the undelivered text with which a stop string begins, or 0."""
        longest = min(max(map(len, self.stops), default=1) - 1, len(self._held))
        ends = (length for length in range(longest, 0, -1) if self._ends_like_stop(length))
        return next(ends, 0)

    def _ends_like_stop(self, length: int) -> bool:
        return any(stop.startswith(self._held[-length:]) for stop in self.stops)


class Job:
    """State of one request.

    Args:
        request: the request.
        index: the index of the request.
        ended: called once, before the last piece or the error is delivered.
    """

    def __init__(self, request: Submission, index: OpenIndex, ended: Callable[["Job"], None]):
        self.request, self.index, self._ended = request, index, ended
        self.channel, self.text = Channel(), StoppedText(request.stop)
        self._ends = _special_tokens(index, request.stop)
        self.sequence: Sequence | None = None
        self.submitted = time.monotonic()
        self.usage: Usage | None = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def engine_request(self) -> Request:
        request = self.request
        return Request(
            request.tokens,
            request.sampling,
            self._on_text,
            self._stops if request.stop else None,
            self._on_token,
            request.logprobs,
            request.sources,
        )

    def due(self) -> Finish | None:
        """Return why the request must end now (cancelled, or its timeout has passed); None if it may continue."""
        if self.channel.cancelled:
            return "cancelled"
        timeout = self.request.timeout
        if timeout is None or time.monotonic() - self.submitted < timeout:
            return None
        return "waited" if self.sequence is None else "timeout"

    def finish(self, answer: Answer | None, reason: Finish | None = None) -> None:
        """Deliver the last piece, with the cost of the answer.

        Args:
            answer: the answer so far; None if the request ends before it has a sequence.
            reason: why the request ends early; None: the answer is complete.
        """
        if reason is None:
            stopped = self.text.found or (answer is not None and answer.finish_reason == "stop") or self._has_ended()
            reason = "stop" if stopped else "length"
        stored, kept = self.index.split.tokens, 0 if self.sequence is None else self.sequence.kept
        self.usage = Usage(
            prompt_tokens=stored + len(self.request.tokens),
            cached_tokens=stored + kept,
            answer_tokens=0 if answer is None else answer.generated_tokens,
            kv_fraction=None if answer is None else answer.kv_fraction,
            layers=() if answer is None else tuple(answer.layers),
            sources=() if answer is None else tuple(answer.sources),
        )
        self._ended(self)
        self._put(self.text.end(), reason)

    def fail(self, error: BaseException) -> None:
        """Deliver the error that ends the request."""
        self._ended(self)
        self.channel.put(error)

    def _on_token(self, token: int, logprobs: TokenLogprobs | None) -> None:
        self._tokens.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)

    def _on_text(self, text: str) -> None:
        if out := self.text.put(text):
            self._put(out)

    def _stops(self) -> bool:
        return self._has_ended() or self.text.found or self._has_stop_waiting()

    def _has_stop_waiting(self) -> bool:
        """Whether a stop string is in text that waits for more tokens."""
        streamer = None if self.sequence is None else self.sequence.streamer
        return streamer is not None and self.text.would_stop(streamer.waiting())

    def _has_ended(self) -> bool:
        """Whether the last token is a special token that is a stop string."""
        return self.sequence is not None and not self._ends.isdisjoint(self.sequence.answer[-1:])

    def _put(self, text: str, finish: Finish | None = None) -> None:
        usage = None if finish is None else self.usage
        self.channel.put(Piece(text, tuple(self._tokens), tuple(self._logprobs), finish, usage))
        self._tokens, self._logprobs = [], []


def check_stops(index: OpenIndex, stops: tuple[str, ...]) -> None:
    """Raise UsageError for a stop string that is empty, or that has a special token together with other text.

    No answer would end at such a string, because special tokens are no part of an answer's text.
    """
    if not all(stops):
        raise UsageError("a stop string is empty; leave it out")
    special = {token.content for token in index.tokenizer.added_tokens_decoder.values() if token.special}
    for stop in set(stops) - special:
        if inside := sorted(token for token in special if token in stop):
            raise UsageError(
                f"the stop string {json.dumps(stop)} has more than the special token {inside[0]}, and special tokens "
                f"are no part of an answer's text, so no answer ends there; give {inside[0]} alone"
            )


def _special_tokens(index: OpenIndex, stops: tuple[str, ...]) -> set[int]:
    """Return the ids of the special tokens among stop strings. Special tokens are no part of an answer's text."""
    added = index.tokenizer.added_tokens_decoder
    return {number for number, token in added.items() if token.special and token.content in stops}


CHUNK = 512
"""Maximum number of question tokens in a step, if questions can be prefilled in several steps."""
SHARE = 0.25
"""Fraction of the memory that a lane reserves, when it opens, for the keys and values of its questions and answers.

A lane has the requests over one index with one config. The memory is the GPU's free memory, or on the CPU the machine's
memory, minus what other open lanes have reserved.
"""
GROWTH = 2
"""Maximum ratio of a buffer's rows to its used rows: a buffer of keys or values doubles when it grows."""
OWN_TOKENS = 2048
"""Number of question and answer tokens of a request for which a lane must have memory.

A lane has the requests over one index with one config. With less memory it answers fewer requests at a time, but at
least one.
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

        An error ends the running requests, closes the engine and is returned. Returns None if there was no error.
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
