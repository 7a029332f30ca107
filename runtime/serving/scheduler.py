"""The scheduler, which answers requests over several open indices of one model by continuous batching."""

from collections.abc import Mapping
from dataclasses import dataclass

from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.serving.stream import Stream
from sparsekv.runtime.serving.submission import Submission

KEPT_BYTES = 256 << 20


@dataclass(frozen=True)
class Measures:
    """What a scheduler does now, and its totals since it was made."""

    waiting: int
    running: int
    answers: int
    answer_tokens: int
    prompt_tokens: int
    cached_tokens: int
    kept_bytes: int
    kv_fraction: float


class Scheduler:
    """Answers requests over several open indices of one model by continuous batching, in a thread of its own.

    The thread begins with the first request and ends when there is nothing to do.

    Args:
        indices: open indices by name; all of the same model.
        slots: maximum number of requests that decode together over one index with one config.
        queue: maximum number of requests that wait for a slot.
        kept_bytes: maximum size of the keys and values that are kept of finished requests, for next turns.
    """

    def __init__(
        self,
        indices: Mapping[str, OpenIndex],
        *,
        slots: int = 16,
        queue: int = 64,
        kept_bytes: int = KEPT_BYTES,
    ):
        raise NotImplementedError

    def add(self, name: str, index: OpenIndex) -> None:
        """Serve one more index, of the same model. An index of this name is replaced; running requests end over it."""
        raise NotImplementedError

    def remove(self, name: str) -> None:
        """Serve an index no longer; its running requests end as usual, then its memory is freed."""
        raise NotImplementedError

    def submit(self, request: Submission) -> Stream:
        """Queue a request; return its answer's stream.

        Raises:
            QueueFullError: the queue is full.
            UsageError: there is no index of this name, the scheduler is closed, the model lacks a token of the request,
                or no position of the model is left for an answer.
        """
        raise NotImplementedError

    def close(self, drain: float) -> None:
        """Refuse new requests, wait up to `drain` seconds for those that run, then cancel the rest."""
        raise NotImplementedError

    def measures(self) -> Measures:
        raise NotImplementedError
