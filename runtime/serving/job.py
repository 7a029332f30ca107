"""State of one request in the scheduler: callbacks for the engine, stop strings, and delivered pieces of the answer."""

import json
import time
from collections.abc import Callable

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.decoding.answer import Answer
from sparsekv.runtime.decoding.engine import Request, Sequence, TokenLogprobs
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.serving.stream import Channel
from sparsekv.runtime.serving.submission import Finish, Piece, Submission, Usage


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
        """Whether more text would have a stop string."""
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
            kv_fraction=0.0 if answer is None else answer.kv_fraction,
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
    """Raise UsageError for a stop string that is empty, or that has other text beside a special token.

    No answer would end at the latter, because special tokens are no part of an answer's text.
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
