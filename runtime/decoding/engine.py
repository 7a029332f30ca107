"""The engine that decodes answers over an open index, one at a time or several in shared steps.

Several questions are answered by continuous batching: each finished answer frees its slot. The tokens of all sequences
in a step go through the model as one row. They are one token of each sequence that is answering, and all tokens of the
questions that begin. So nothing is padded, and the model's weights and the document's rows are read once for all
sequences.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.models.rope import rope_depends_on_length
from sparsekv.kernels.common.given_rows import with_cache
from sparsekv.kernels.common.hook import calling_back, route_attention
from sparsekv.runtime.attention.config import Dense
from sparsekv.runtime.attention.sparse_layer import SparseLayer, packed_layer
from sparsekv.runtime.cache.buffers import read_share, total_read
from sparsekv.runtime.cache.index_cache import Fed, IndexCache, SequenceCache
from sparsekv.runtime.cache.packed_cache import BatchedCache, PackedCache
from sparsekv.runtime.decoding.answer import (
    Answer,
    Streamer,
    answer_of,
    answer_room,
    ending_tokens,
    unshown_endings,
)
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.sampling import Sampling, draw
from sparsekv.runtime.decoding.step import DecodeStep
from sparsekv.runtime.decoding.threads import all_cores, exclusive, free_cores
from sparsekv.runtime.selection.interface import MethodSpec

QUESTION_TOKENS = 2048
"""Maximum number of tokens of the questions that begin in one step; a longer question is the only one to begin.

With a maximum of 512 a GPU would wait for the host, which launches the same number of operations for fewer tokens.
"""


def why_alone(index: OpenIndex, attention: MethodSpec | Dense, cache: IndexCache) -> str:
    """Return the reason why several questions cannot share a step; empty if they can."""
    if rope_depends_on_length(index.artifact.manifest.rope.parameters):
        return "this model turns keys by the length of a sequence, and sequences in a step have several lengths"
    plans = [layer.plan for layer in cache.stored_layers if isinstance(layer, SparseLayer)]
    if isinstance(attention, MethodSpec) and not attention.method.can_unite():
        return "this method represents unselected tokens by weights or a mean that differ from question to question"
    if not all(plan.shareable for plan in plans):
        return "--gauge, --guard, --ahead, --stream and --step keep state of one question, which others cannot use"
    return ""


def pack(cache: IndexCache, slots: int) -> PackedCache:
    """Make a cache for `slots` sequences that shares the stored context of `cache`."""
    layers = [packed_layer(layer, slots) for layer in cache.stored_layers]
    return (BatchedCache if cache.states.kinds.keeping else PackedCache)(cache, layers, slots)


class NotFiniteError(SparsekvError):
    """Raised when a model's logits are not finite, so that no next token can be chosen."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite numbers, so there is no answer; check the index with inspect --verify, "
            "and the model in --dtype float32"
        )


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's log-probability, and the likeliest tokens with theirs; of the logits in float32, at temperature 1."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Request:
    """A question's token ids [Q], how its answer is sampled, and the caller's callbacks.

    `on_text` is called with each piece of text as it is decoded. `stop` is called after each token, in the thread that
    generates; the answer ends when it returns True.
    """

    question: torch.Tensor
    sampling: Sampling
    on_text: Callable[[str], None] | None = None
    stop: Callable[[], bool] | None = None


class _Sequence:
    """One question and its answer so far.

    `number` is the question's index. `used` is the number of the sequence's own tokens in the cache, and `longest` the
    maximum number of answer tokens. `started`, `first` and `last` are clock readings in seconds. `read_before` are the
    counts of rows read when the question began.
    """

    def __init__(self, index: OpenIndex, request: Request, number: int, used: int, longest: int):
        self.request, self.number, self.used, self.longest = request, number, used, longest
        self.question, self.prompt_tokens = request.question, index.split.tokens + used + len(request.question)
        self.random = torch.Generator(index.model.device).manual_seed(request.sampling.seed)
        on_text = request.on_text
        self.streamer = on_text and Streamer(index.tokenizer, on_text, unshown_endings(index))
        self.answer: list[int] = []
        self.streamed, self.stopped = 0, False
        self.started, self.first, self.last = time.perf_counter(), 0.0, 0.0
        self.read_before = (0.0, 0)

    @property
    def most(self) -> int:
        """Maximum number of own rows of the sequence, which it has at the end of the longest allowed answer."""
        return self.used + self.longest - len(self.answer)

    def fed(self, slot: int) -> Fed:
        """Return the tokens to feed next: first the whole question, later the newest answer token."""
        tokens = self.answer[-1:] or self.question.tolist()
        return Fed(slot, self.used, tokens, asks=not self.answer)

    def take(self, token: int, ends: set[int]) -> bool:
        """Add the next token of the answer; return whether the answer is complete."""
        self.used += 1 if self.answer else len(self.question)
        self.answer.append(token)
        self.last = time.perf_counter()
        self.first = self.first or self.last
        ended = token in ends or len(self.answer) == self.longest
        # The first token's text is streamed before the next step, which may be captured, and then takes long.
        if ended or len(self.answer) == 1 or self.request.stop is not None:
            self.stream()
        if self.request.stop is not None:
            with calling_back():
                self.stopped = bool(self.request.stop())
        if (ended or self.stopped) and self.streamer is not None:
            self.streamer.end()  # type: ignore[no-untyped-call]
        return ended or self.stopped

    def stream(self) -> None:
        """Pass the tokens that were not streamed yet on as text."""
        if self.streamer is not None:
            for token in self.answer[self.streamed :]:
                self.streamer.put(torch.tensor([token]))
        self.streamed = len(self.answer)


class Engine:
    """Decodes questions over one index, as many at a time as its cache has slots.

    In each step allocates the logits of all sequences.

    Args:
        cache: a cache of the index. If it is packed, `why_alone` returns no reason for the cache that it shares. No
            other code may use its rows meanwhile.
    """

    def __init__(self, index: OpenIndex, cache: SequenceCache):
        self.index, self.cache, self.slots = index, cache, cache.slots
        self.step = DecodeStep(index.model, cache, index.split.tokens)
        self.active: dict[int, _Sequence] = {}
        self.read: tuple[float, int] | None = None
        self.ends = ending_tokens(index)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one decode step for all slots over the stored context, then rewind the cache.

        Kernels that this step compiles and the graph that it captures stay.
        """
        model, last = self.index.model, self.index.input_ids[-1:]
        with exclusive(model), route_attention(model, self.cache.attend), all_cores(model):
            self.cache.rewind()
            fed = [Fed(slot, 0, last.tolist(), asks=False) for slot in range(self.slots)]
            self.step(fed, last.expand(self.slots), self.cache.ROOM)
            self.cache.release()
            self.cache.rewind()

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Answer questions; yield each answer with its question's index once it is complete.

        While this generator waits for its caller, other threads may use the model. If one of them rewinds the cache
        while questions are being answered, this generator raises.

        Raises:
            UsageError: no position of the model is left for an answer, another question was asked over the same cache
                between two answers, or this was called from an answer's callback.
            NotFiniteError: the model's logits are not finite.
        """
        before = self.index.split.tokens
        waiting = [(number, one, self._longest(one, before)) for number, one in enumerate(requests)][::-1]
        self.active, left, mine = {}, 0, 0
        while waiting or left:
            with exclusive(self.index.model):
                if left and self.cache.rewinds != mine:
                    raise UsageError("another question was asked over the cache of a batch; ask again, or ask_all")
                done = self._until_answered(waiting)
                left, mine = len(self.active), self.cache.rewinds
            yield from done

    def answer(self, request: Request, before: int) -> Answer:
        """Answer one question after the first `before` tokens, which the cache holds. Call it within `exclusive`.

        All tokens except the last one of the answer stay in the cache. Raises what `answers` raises.
        """
        longest = self._longest(request, before)
        self.active = {0: _Sequence(self.index, request, 0, before - self.index.split.tokens, longest)}
        self.cache.expect_prompt(before + len(request.question))
        ((_, answer),) = self._until_answered([])
        return answer

    @torch.inference_mode()
    def _until_answered(self, waiting: list[tuple[int, Request, int]]) -> list[tuple[int, Answer]]:
        """Run steps until one completes answers; return the completed questions' indices and answers."""
        model, done = self.index.model, list[tuple[int, Answer]]()
        with route_attention(model, self.cache.attend), free_cores(model) as cores, all_cores(model):
            try:
                while not done:
                    cores.follow()
                    self._admit(waiting)
                    done = self._step()
            finally:
                self.cache.release()
        return done

    def _longest(self, request: Request, before: int) -> int:
        room = answer_room(self.index, before + len(request.question))
        return request.sampling.max_new_tokens if room is None else min(room, request.sampling.max_new_tokens)

    def _admit(self, waiting: list[tuple[int, Request, int]]) -> None:
        """Assign free slots to the next questions, up to QUESTION_TOKENS tokens together."""
        tokens = 0
        if waiting and not self.active:
            self.cache.rewind()
            self.read = None
        for slot in range(self.slots):
            if not waiting or (tokens and tokens + len(waiting[-1][1].question) > QUESTION_TOKENS):
                return
            if slot not in self.active:
                number, request, longest = waiting.pop()
                sequence = _Sequence(self.index, request, number, 0, longest)
                self.cache.expect_prompt(sequence.prompt_tokens)
                sequence.read_before = self._read()
                self.active[slot] = sequence
                tokens += len(request.question)

    def _step(self) -> list[tuple[int, Answer]]:
        """Run one step; return the indices and answers of the questions that it completes."""
        passes = self.cache.passes([self.active[slot].fed(slot) for slot in sorted(self.active)])
        slots = [one.slot for fed in passes for one in fed]
        parts = [self._logits(fed) for fed in passes]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.read = None
        for sequence in self.active.values():
            sequence.stream()  # while the device computes the step
        complete = [
            slot
            for slot, token in zip(slots, self._choose(logits, slots), strict=True)
            if self.active[slot].take(token, self.ends)
        ]
        return [self._answer(self.active.pop(slot)) for slot in complete]

    def _logits(self, fed: list[Fed]) -> torch.Tensor:
        """Run a forward pass; return the logits [B, V] of its sequences, which the next decode step may overwrite."""
        if any(one.asks for one in fed):
            return self._begin(fed)
        newest = torch.tensor([one.tokens[0] for one in fed])
        return self.step(fed, newest, max(self.active[one.slot].most for one in fed))

    def _begin(self, fed: list[Fed]) -> torch.Tensor:
        """Run a pass in which some questions begin; return the logits [B, V]."""
        ids, positions = self.cache.questions_input(fed, self.index.split.tokens)
        ends = torch.tensor([len(one.tokens) for one in fed], device=ids.device).cumsum(0)
        logits: torch.Tensor = self.index.model(
            input_ids=ids,
            position_ids=positions,
            **with_cache(self.index.model, self.cache),
            logits_to_keep=ends - 1,
        ).logits[0]
        return logits

    def _choose(self, logits: torch.Tensor, slots: list[int]) -> list[int]:
        """Choose the next token of each sequence from its logits [B, V], by sampling or as the argmax."""
        scores = self.index.agreed(logits.to(torch.float32, copy=True))
        highest, best = scores.max(-1)
        *tokens, finite = torch.cat([best, highest.isfinite().all()[None]]).tolist()
        if not finite:
            raise NotFiniteError
        sampled: dict[Sampling, list[int]] = {}
        for place, slot in enumerate(slots):
            if (sampling := self.active[slot].request.sampling).temperature:
                sampled.setdefault(sampling, []).append(place)
        for sampling, places in sampled.items():
            drawn = draw(scores[places], sampling, [self.active[slots[place]].random for place in places])
            for place, token in zip(places, drawn, strict=True):
                tokens[place] = token
        return tokens

    def _read(self) -> tuple[float, int]:
        """Return the rows read for all sequences so far, and the rows that dense attention would have read.

        The first call after a step needs one sync.
        """
        if self.read is None:
            counts = self.cache.reads
            self.read = total_read(counts), sum(count.dense for count in counts)
        return self.read

    def _answer(self, done: _Sequence) -> tuple[int, Answer]:
        read, dense = (now - before for now, before in zip(self._read(), done.read_before, strict=True))
        answer = answer_of(
            self.index,
            done.answer,
            done.prompt_tokens,
            (done.started, done.first, done.last),
            read_share(read, dense, counted=bool(self.cache.reads)),
            self.cache.stats(),
        )
        interrupted = done.stopped and answer.finish_reason == "length"
        return done.number, replace(answer, finish_reason="interrupted") if interrupted else answer


def generate(
    index: OpenIndex,
    cache: IndexCache,
    question: torch.Tensor,
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Answer:
    """Answer one question; the cache is rewound first, so one cache serves many questions.

    Other threads that use the model wait until the answer is complete. A failed question does not affect the answer to
    the next question.

    Args:
        question: [Q] token ids after the stored prompt; only these are prefilled.
        on_text, stop: as in `Request`.

    Raises:
        UsageError: no position of the model is left for an answer, or this was called from a callback of an answer.
        NotFiniteError: the model's logits are not finite.
    """
    with exclusive(index.model):
        cache.rewind()
        return Engine(index, cache).answer(Request(question, sampling, on_text, stop), index.split.tokens)


def answer_after(index: OpenIndex, cache: IndexCache, before: torch.Tensor, request: Request) -> Answer:
    """Answer a question that follows the tokens `before`. Call it within `exclusive`.

    All tokens except the last one of the answer stay in the cache.

    Args:
        before: [N] token ids of the stored prompt and of everything after it. If the cache lacks the last of them, it
            is prefilled with the question.

    Raises:
        SparsekvError: the number of tokens in the cache does not match `before`.
        UsageError, NotFiniteError: as `generate`.
    """
    cache.check_length(len(before))
    held = cache.get_seq_length()
    prompt = torch.cat([before[held:], request.question])
    return Engine(index, cache).answer(replace(request, question=prompt), held)
