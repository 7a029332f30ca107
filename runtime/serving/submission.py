"""A request to the scheduler, the pieces of its answer, and the errors of the queue."""

from dataclasses import dataclass
from typing import Literal

import torch

from sparsekv.formats.errors import SparsekvError
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.cache.index_cache import LayerStats
from sparsekv.runtime.decoding.engine import TokenLogprobs
from sparsekv.runtime.decoding.sampling import Sampling
from sparsekv.runtime.sources.places import Source

Finish = Literal["stop", "length", "timeout", "waited", "cancelled"]
"""Why an answer ended.

`stop`: by an EOS token or a stop string. `length`: a limit of the answer's length was reached. `timeout`: the timeout
passed while the request was answered. `waited`: the timeout passed before the request got a slot. `cancelled`: by the
caller.
"""


class QueueFullError(SparsekvError):
    """Raised when the queue of a scheduler is full; `retry_after` is an estimate of the seconds until it has room."""

    def __init__(self, retry_after: float):
        super().__init__(f"too many questions are waiting; ask again in {retry_after:.0f} s")
        self.retry_after = retry_after


@dataclass(frozen=True)
class Submission:
    """A request: a question over one of a scheduler's indices.

    Args:
        index: the name of the index.
        config: the decode config. Requests with the same index and equal configs share steps, if the config allows it.
        tokens: [Q] int64, all token ids after the document: earlier turns, the question, and their chat frames.
        stop: strings that end the answer; the text from the first one on is not delivered.
        logprobs: number of likeliest tokens to return in each token's log-probabilities; None: no log-probabilities are
            returned.
        timeout: seconds after which the answer ends with the finish `timeout` or `waited`; None: no limit.
        sources: maximum number of the answer's sources.
    """

    index: str
    config: DecodeConfig
    tokens: torch.Tensor
    sampling: Sampling
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    timeout: float | None = None
    sources: int = 0


@dataclass(frozen=True)
class Usage:
    """Cost of an answer.

    `prompt_tokens` includes the document and earlier turns. `cached_tokens` is the number of prompt tokens that were
    not prefilled: the document, and earlier turns whose keys and values were still in memory. `kv_fraction` is the
    number of key, value and index rows that the decode steps read, divided by the number that dense attention would
    read. `layers` has the missed mass of each layer if the config measures the missed mass. `sources` are the answer's
    sources, if the request asks for sources.
    """

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    kv_fraction: float
    layers: tuple[LayerStats, ...] = ()
    sources: tuple[Source, ...] = ()

    @property
    def steps(self) -> int:
        """Number of decode steps, which give all tokens but the first."""
        return max(0, self.answer_tokens - 1)


@dataclass(frozen=True)
class Piece:
    """A piece of an answer: the text and the token ids since the previous piece.

    `logprobs` is empty unless the request asks for log-probabilities. Only the last piece has `finish` and `usage`; its
    text may be empty.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None
