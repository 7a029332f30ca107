"""A session with streamed answers for many threads and asyncio tasks at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch

from sparsekv.formats.errors import UsageError, check_type
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.engine import why_alone
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.sampling import Sampling
from sparsekv.runtime.decoding.session import Session, chosen_sampling
from sparsekv.runtime.serving.scheduler import Scheduler
from sparsekv.runtime.serving.stream import Stream
from sparsekv.runtime.serving.submission import Submission

WAITING = 1 << 20
"""Maximum number of questions of one process that wait for a slot."""


@dataclass(frozen=True, repr=False, eq=False)
class StreamingSession(Session):
    """A session with streamed answers for many threads and asyncio tasks at once.

    Concurrent questions share steps if the config allows shared steps. Otherwise the questions are answered one after
    another, over a second cache.
    """

    _schedulers: list[Scheduler] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def stream(
        self,
        question: str | torch.Tensor,
        sampling: Sampling | None = None,
        *,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        timeout: float | None = None,
        sources: int = 0,
    ) -> Stream:
        """Ask a question; return an iterator of the pieces of the answer, for `for` and for `async for`.

        Decoding is greedy by default. Leaving the loop ends the answer. This method raises the errors of
        `question_ids` and of `Scheduler.submit`, and UsageError for an argument of another type. The iterator raises
        the errors of `generate`.

        Args:
            question: as for `ask`.
            stop, logprobs, timeout, sources: as in `Submission`.
        """
        if not isinstance(stop, str | Sequence) or not all(isinstance(text, str) for text in stop):
            raise UsageError(f"stop is {stop!r}: give a string, or a list of strings")
        for name, value, kind in (("logprobs", logprobs, int | None), ("timeout", timeout, float | None)):
            check_type(name, value, kind)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        ids = self._ids(question)
        return self._scheduler().submit(
            Submission("", self.config, ids, chosen_sampling(sampling), stops, logprobs, timeout, sources)
        )

    def _scheduler(self) -> Scheduler:
        with self._lock:
            if not self._schedulers:
                self._schedulers.append(Scheduler({"": self.index}, queue=WAITING, make_cache=self._cache))
            return self._schedulers[0]

    def _cache(self, index: OpenIndex, config: DecodeConfig) -> IndexCache:
        """Return the session's cache if several questions can share steps over that cache, otherwise a new cache."""
        return index.cache(config) if why_alone(index, config.attention, self.cache) else self.cache
