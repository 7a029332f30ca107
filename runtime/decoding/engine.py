"""The engine that decodes answers over an open index, one at a time or several in shared steps.

Several questions are answered by continuous batching: each finished answer frees its slot. A step feeds one token of
each sequence that is answering, and the tokens of questions that begin, up to a limit. All these tokens go through the
model as one row without padding, so the model's weights and the document's keys and values are read once for all
sequences.

There are two exceptions. On a GPU the tokens of answers and the tokens of questions are two passes, and a CUDA graph
may pad the pass of answers. In models with recurrent layers, each question is a pass of its own.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from numbers import Integral
from typing import Any

import torch

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.models.rope import rope_depends_on_length
from sparsekv.kernels.common.given_rows import with_cache
from sparsekv.kernels.common.hook import calling_back, route_attention
from sparsekv.runtime.attention.config import MOST_SOURCES, Dense
from sparsekv.runtime.attention.sparse_layer import SparseLayer, appends, divides_questions, packed_layer
from sparsekv.runtime.cache.buffers import read_share, total_read
from sparsekv.runtime.cache.index_cache import Fed, IndexCache, SequenceCache
from sparsekv.runtime.cache.kept_turns import KeptRows, KeptTurns
from sparsekv.runtime.cache.packed_cache import BatchedCache, PackedCache, sent
from sparsekv.runtime.decoding.answer import (
    Answer,
    Sampling,
    Streamer,
    answer_of,
    answer_room,
    draw,
    ending_tokens,
    unshown_endings,
)
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.step import DecodeStep
from sparsekv.runtime.decoding.threads import FreeCores, all_cores, exclusive, free_cores
from sparsekv.runtime.selection.interface import MethodSpec
from sparsekv.runtime.sources.places import Source

QUESTION_TOKENS = 2048
"""Maximum number of tokens of the questions that begin in one step, for an engine without `chunk`.

A longer question begins alone.
With a maximum of 512 a GPU would wait for the host, which launches the same number of operations for few tokens as for
many.
"""

HOLD_SHARE, MOST_HELD = 0.5, 12
"""Limits of the time for which waiting questions are held back while other sequences answer.

A step with a question cannot be replayed as a CUDA graph, and all answering sequences wait for it. On an H200, with 64
answering sequences, such a step takes 2.3 times as long as a step without one. Therefore questions wait, so that
several begin in the same step. They begin after `MOST_HELD` steps, or earlier: when the number of steps waited, summed
over the questions, reaches `HOLD_SHARE` times the number of answering sequences.
"""


def why_alone(index: OpenIndex, attention: MethodSpec | Dense, cache: IndexCache) -> str:
    """Return the reason why several questions cannot share a step; an empty string if they can."""
    if rope_depends_on_length(index.artifact.manifest.rope.parameters):
        return "this model's RoPE depends on a sequence's length, and sequences that share a step differ in length"
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
            "the model's logits are not finite numbers, so there is no answer; check the index with "
            "`sparsekv inspect --verify`, and the model in float32"
        )


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a token, and the likeliest tokens at its position as pairs (id, log-probability).

    Log-probabilities are computed in float32 at temperature 1.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class PrefilledQuestion:
    """The keys, values and states of a question [Q] after the stored context, and the logits [V] after its last token.

    All tensors are in the host's memory. `seconds` is the time of the prefill.
    """

    rows: KeptRows
    logits: torch.Tensor
    seconds: float


@dataclass(frozen=True)
class Request:
    """A question's token ids [Q], how its answer is sampled, and the caller's callbacks.

    `on_token` is called with each token, and `on_text` with each piece of text that tokens complete. `stop` is called
    after each token, in the thread that generates; the answer ends when `stop` returns True. `logprobs` is the number
    of likeliest tokens in the log-probabilities that `on_token` gets; None: `on_token` gets no log-probabilities.
    `sources` is the maximum number of the answer's sources. With `prefilled`, the question's tokens are not fed again.
    Sources cannot be requested then, because the question's queries are unknown.

    Raises:
        UsageError: `sources` is not a whole number from 0 to MOST_SOURCES, or a callback is not a function.
    """

    question: torch.Tensor
    sampling: Sampling
    on_text: Callable[[str], None] | None = None
    stop: Callable[[], bool] | None = None
    on_token: Callable[[int, TokenLogprobs | None], None] | None = None
    logprobs: int | None = None
    sources: int = 0
    prefilled: PrefilledQuestion | None = None

    def __post_init__(self) -> None:
        assert not (self.sources and self.prefilled)
        sources: Any = self.sources
        whole = isinstance(sources, Integral) and not isinstance(sources, bool)
        if not whole or not 0 <= sources <= MOST_SOURCES:
            raise UsageError(f"sources is {sources!r}: give a whole number up to {MOST_SOURCES}")
        for name, given in {"on_text": self.on_text, "stop": self.stop, "on_token": self.on_token}.items():
            if given is not None and not callable(given):
                raise UsageError(f"{name} is {given!r}: give a function")


class Sequence:
    """One question and its answer so far.

    `used` is the number of the sequence's tokens in the cache, after the stored context. `asked` is the number of the
    question's tokens in the cache. The rows of the first `kept` of these tokens are copies, from an earlier sequence or
    from `Request.prefilled`.
    `longest` is the maximum number of answer tokens. `started`, `first` and `last` are clock readings in seconds: when
    the question began, and when the first and the last token so far were chosen. `read_before` are the counts of rows
    read when the question began.
    """

    def __init__(self, index: OpenIndex, request: Request, used: int, longest: int):
        self.request, self.used, self.longest = request, used, longest
        self.question, self.prompt_tokens = request.question.tolist(), index.split.tokens + used + len(request.question)
        self.random = torch.Generator(index.model.device).manual_seed(int(request.sampling.seed))
        on_text = request.on_text
        self.streamer = on_text and Streamer(index.tokenizer, on_text, unshown_endings(index))
        self.answer: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.asked, self.kept, self.streamed, self.stopped = 0, 0, 0, False
        self.most = used + len(self.question) + longest - 1
        """Number of the sequence's rows after the stored context, at the end of the longest allowed answer."""
        self.started, self.first, self.last = time.perf_counter(), 0.0, 0.0
        self.read_before = (0.0, 0)
        self.queries: list[torch.Tensor] = []
        """If sources are requested: for each token of the answer, the retrieval heads' queries [C] of the token before.
        """

    def fed(self, slot: int, most: int | None) -> Fed:
        """Return the tokens to feed next: the next part of the question, or the answer's newest token.

        A part has up to `most` tokens; None: it is the rest of the question. After a prefilled question, the first call
        returns no tokens.
        """
        tokens = self.answer[-1:] or self.question[self.asked :][:most]
        return Fed(slot, self.used, tokens, asks=not self.answer)

    def feed(self, fed: Fed) -> bool:
        """Count fed tokens; return whether the whole question has been fed. The logits then give an answer token."""
        self.used += len(fed.tokens)
        self.asked += len(fed.tokens) if fed.asks else 0
        return self.asked == len(self.question)

    def chooses(self, fed: Fed) -> bool:
        """Whether an answer token is chosen after these tokens are fed."""
        return not fed.asks or self.asked + len(fed.tokens) == len(self.question)

    def take(self, token: int, logprobs: TokenLogprobs | None, ends: set[int]) -> bool:
        """Add the next token of the answer; return whether the answer is complete or `stop` has ended it."""
        self.answer.append(token)
        self.logprobs.append(logprobs)
        self.last = time.perf_counter()
        self.first = self.first or self.last
        ended = token in ends or len(self.answer) == self.longest
        # The text of the first token is streamed before the next step, because capturing a CUDA graph makes that step
        # slow.
        if ended or len(self.answer) == 1 or self.request.stop is not None:
            self.stream()
        if self.request.stop is not None:
            with calling_back():
                self.stopped = bool(self.request.stop())
        if ended or self.stopped:
            self.end_text()
        return ended or self.stopped

    def stream(self) -> None:
        """Pass the new tokens to `on_token`, and their text to `on_text`."""
        for token, logprobs in zip(self.answer[self.streamed :], self.logprobs[self.streamed :], strict=True):
            if self.request.on_token is not None:
                with calling_back():
                    self.request.on_token(token, logprobs)
            if self.streamer is not None:
                self.streamer.put(token)
        self.streamed = len(self.answer)

    def end_text(self) -> None:
        """Pass all remaining tokens and text to the callbacks, including text that was held back for more tokens."""
        self.stream()
        if self.streamer is not None:
            self.streamer.end()


Ended = tuple[Sequence, "Answer | NotFiniteError"]
"""A sequence that has ended, and its answer or the error that ended the sequence."""


class Engine:
    """Decodes questions over one index, as many at a time as the cache has slots.

    Sequences in `waiting` wait until a step gives them a free slot. Each step allocates the logits of all sequences.

    Args:
        cache: a cache of the index. No other code may use the cache while the engine answers. A packed cache must have
            been made from a cache for which `why_alone` returns an empty string.
        chunk: maximum number of question tokens in a step, if the cache can prefill a question in several steps; None:
            questions are never divided.
        turns: stores copies of ended sequences' rows, for questions that begin with the same tokens; only for a cache
            of several sequences.
        own_tokens: maximum number of tokens of a question and its answer for which memory is planned; None: no limit.
    """

    def __init__(
        self,
        index: OpenIndex,
        cache: SequenceCache,
        *,
        chunk: int | None = None,
        turns: KeptTurns | None = None,
        own_tokens: int | None = None,
    ):
        self.index, self.cache, self.slots, self.own_tokens = index, cache, cache.slots, own_tokens
        self.chunk, self.turns = chunk if divides_questions(cache.stored_layers) else None, turns
        self.step = DecodeStep(index.model, cache, index.split.tokens)
        self.active: dict[int, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.read: tuple[float, int] | None = None
        self._held = (0, 0)
        """Number of steps in a row for which questions were held back, and the sum of the questions in these steps."""
        self.ends = ending_tokens(index)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one decode step with a sequence in every slot over the stored context, then rewind the cache.

        Later steps use the kernels that this step compiles and the CUDA graph that it captures.
        """
        model, last = self.index.model, self.index.input_ids[-1:]
        with exclusive(model), route_attention(model, self.cache.attend), all_cores(model):
            self.cache.rewind()
            fed = [Fed(slot, 0, last.tolist(), asks=False) for slot in range(self.slots)]
            self.step(fed, last.expand(self.slots), self.cache.ROOM)
            self.cache.release()
            self.cache.rewind()

    def answers(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """Answer questions; yield each answer with its question's index once it is complete.

        While this generator waits for its caller, other threads may use the model. If another thread rewinds the cache
        before all questions are answered, this generator raises.

        Raises:
            UsageError: another question was asked over the same cache between two answers.
            NotFiniteError: the model's logits are not finite. Also raises the errors of `sequence` and of `exclusive`.
        """
        waiting = deque(self.sequence(one) for one in requests)
        numbers = {one: number for number, one in enumerate(waiting)}
        self.active, left, mine = {}, 0, 0
        while waiting or left:
            with exclusive(self.index.model):
                if left and self.cache.rewinds != mine:
                    raise UsageError(
                        "another question was asked between two answers of a batch, over the same cache; ask the batch "
                        "again, or use ask_all"
                    )
                self.waiting = waiting
                done = self._until_answered()
                left, mine = len(self.active), self.cache.rewinds
            yield from ((numbers[one], answer) for one, answer in done)

    def answer(self, request: Request, before: int) -> Answer:
        """Answer one question, which follows the `before` tokens in the cache. Call this method within `exclusive`.

        All tokens except the last one of the answer stay in the cache. Raises NotFiniteError if the model's logits are
        not finite, and the errors of `sequence`.
        """
        sequence = self.sequence(request, before)
        self.active, self.waiting = {0: sequence}, deque()
        self.cache.expect_prompt(before + len(request.question))
        if request.prefilled is not None:
            self._restore(0, sequence, request.prefilled.rows)
        ((_, answer),) = self._until_answered()
        return answer

    def sequence(self, request: Request, before: int | None = None) -> Sequence:
        """Make the sequence of a request after the first `before` tokens, by default those of the stored context.

        Raises:
            UsageError: no position of the model is left for an answer, the question exceeds `own_tokens`, or sources
                are requested from a cache that moves an answer's tokens into the index.
        """
        before = self.index.split.tokens if before is None else before
        if request.sources:
            self._watch()
        room, longest = answer_room(self.index, before + len(request.question)), request.sampling.max_new_tokens
        longest = longest if room is None else min(room, longest)
        if self.own_tokens is not None:
            longest = min(longest, self.own_tokens - len(request.question))
            if longest < 1:
                raise UsageError(
                    f"the question has {len(request.question):,} tokens, and each of the questions that may decode "
                    f"together has memory for a question and answer of {self.own_tokens:,}; ask a shorter question, "
                    "serve with a smaller --batch-size, or in Python use `ask` instead of `stream`"
                )
        return Sequence(self.index, request, before - self.index.split.tokens, longest)

    def _watch(self) -> None:
        """Let the cache record the retrieval heads' queries, from which sources are computed.

        Raises UsageError for a cache that moves an answer's tokens into the index.
        """
        if appends(self.cache.stored_layers):
            raise UsageError(
                "--sources cannot be used with --stream, which moves the answer's tokens into the index; leave "
                "one of them out"
            )
        if self.cache.watched is None:
            self.cache.watch(self.index.source_finder.watched(self.cache.slots))

    def recount(self) -> None:
        """Restart the counts of rows read, because another question over the same stored context has reset them."""
        self.read = None
        for sequence in self.active.values():
            sequence.read_before = self._read()

    @torch.inference_mode()
    def drop(self, sequence: Sequence) -> Answer:
        """End a sequence before its next step; return its answer so far."""
        for slot, one in self.active.items():
            if one is sequence:
                sequence.end_text()
                return self._end(slot)[1]
        self.waiting.remove(sequence)
        return self._answer(sequence)

    @contextmanager
    def running(self) -> Iterator[FreeCores]:
        """Route the model's attention to the cache within the context. Call `run_step` within this context.

        Yields an object whose `follow` adapts the number of CPU threads to the free cores.
        """
        model = self.index.model
        with route_attention(model, self.cache.attend), free_cores(model) as cores, all_cores(model):
            try:
                yield cores
            finally:
                self.cache.release()

    def _until_answered(self) -> list[tuple[Sequence, Answer]]:
        """Run steps until at least one answer is complete; return the completed sequences and their answers.

        Raises NotFiniteError if the logits of a sequence are not finite.
        """
        done = list[tuple[Sequence, Answer]]()
        with self.running() as cores:
            while not done:
                cores.follow()
                for sequence, answer in self.run_step():
                    if isinstance(answer, NotFiniteError):
                        raise answer
                    done.append((sequence, answer))
        return done

    @torch.inference_mode()
    def run_step(self) -> list[Ended]:
        """Run one step; return the sequences that end in this step.

        Call this method within `running`, with at least one active or waiting sequence.
        """
        begun = self._fed()
        prefilled, fed = [one for one in begun if not one.tokens], [one for one in begun if one.tokens]
        passes = self.cache.passes(fed) if fed else []
        parts = [*(self._pass(one) for one in passes), *self._prefilled_logits(prefilled)]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.read = None
        for sequence in self.active.values():
            sequence.stream()  # runs while the device computes the step
        fed = [*chain.from_iterable(passes), *prefilled]
        whole = [place for place, one in enumerate(fed) if self.active[one.slot].feed(one)]
        if not whole:
            return []
        slots = [fed[place].slot for place in whole]
        chosen = self._choose(logits if len(whole) == len(fed) else logits[whole], slots)
        ended = list[Ended]()
        for slot, token, logprobs in zip(slots, *chosen, strict=True):
            if token is None:
                ended.append((self.active.pop(slot), NotFiniteError()))
                self.cache.clear(slot)
            elif self.active[slot].take(token, logprobs, self.ends):
                ended.append(self._end(slot))
        return ended

    def _fed(self) -> list[Fed]:
        """Assign free slots to waiting questions; return the tokens to feed in the next step.

        The cache is rewound first, if questions wait and no sequence is active.
        """
        if self.waiting and not self.active:
            self.cache.rewind()
            self.read = None
        fed, left = list[Fed](), self.chunk or QUESTION_TOKENS
        for slot, sequence in self.active.items():
            if sequence.answer or left:
                fed.append(sequence.fed(slot, self.chunk and left))
                left -= len(fed[-1].tokens) if fed[-1].asks else 0
        free = [slot for slot in range(self.slots) if slot not in self.active]
        for slot in [] if self._holds(len(free)) else free:
            if not self._may_begin(left):
                break
            sequence = self._begin(slot)
            fed.append(sequence.fed(slot, self.chunk and left))
            # A prefilled question counts, too, so that the same questions share steps as without the prefill.
            left -= len(fed[-1].tokens) or len(sequence.question)
        return sorted(fed, key=lambda one: one.slot)

    def _holds(self, free: int) -> bool:
        """Whether waiting questions must stay back in the next step although the cache has free slots for them.

        The step can then be replayed as a CUDA graph; see `HOLD_SHARE`.
        """
        could = min(free, len(self.waiting))
        replayed = bool(self.cache.graphs) and all(one.answer for one in self.active.values())
        steps, waited = self._held
        worth_it = steps < MOST_HELD and waited < HOLD_SHARE * len(self.active)
        holds = bool(could) and bool(self.active) and replayed and worth_it
        self._held = (steps + 1, waited + could) if holds else (0, 0)
        return holds

    def _may_begin(self, tokens: int) -> bool:
        """Whether the next question may begin in a step that has room for `tokens` more tokens of questions.

        Without `chunk`, the question must fit into this room, or be the only question of the step.
        """
        if not self.waiting or self.chunk:
            return bool(self.waiting) and tokens > 0
        return tokens == QUESTION_TOKENS or len(self.waiting[0].question) <= tokens

    def _begin(self, slot: int) -> Sequence:
        """Give a slot to the next waiting question; return its sequence.

        If copies of the rows of the question's first tokens are stored, they are restored.
        """
        sequence = self.waiting.popleft()
        self.cache.expect_prompt(sequence.prompt_tokens)
        sequence.started, sequence.read_before = time.perf_counter(), self._read()
        if (prefilled := sequence.request.prefilled) is not None:
            self._restore(slot, sequence, prefilled.rows)
        elif self.turns is not None and (kept := self.turns.find(sequence.question)) is not None:
            self._restore(slot, sequence, kept)
        self.active[slot] = sequence
        return sequence

    @torch.inference_mode()
    def _restore(self, slot: int, sequence: Sequence, kept: KeptRows) -> None:
        self.cache.restore(slot, kept)
        sequence.kept = sequence.used = sequence.asked = kept.tokens

    def _prefilled_logits(self, fed: list[Fed]) -> list[torch.Tensor]:
        """Return the logits [V] after each prefilled question, as rows [1, V] on the model's device."""
        prefilled = (self.active[one.slot].request.prefilled for one in fed)
        return [one.logits[None].to(self.index.device) for one in prefilled if one is not None]

    def _end(self, slot: int) -> tuple[Sequence, Answer]:
        """Free a slot; return its sequence and answer.

        With `turns`, the slot's keys and values are copied, for later questions that begin with the same tokens.
        """
        sequence = self.active.pop(slot)
        sources = self._sources(slot, sequence)
        if self.turns is not None:
            tokens = [*sequence.question, *sequence.answer][: sequence.used]
            self.turns.keep(tokens, lambda: self.cache.kept(slot, len(tokens)))
        return sequence, replace(self._answer(sequence), sources=sources)

    def _sources(self, slot: int, sequence: Sequence) -> list[Source]:
        if not sequence.queries or self.cache.watched is None:
            return []
        steps, own_keys = torch.stack(sequence.queries), partial(self.cache.own_keys, slot=slot, tokens=sequence.used)
        watched = self.cache.watched
        queries = {layer: watched.of_layer(layer, steps) for layer in watched.heads}
        return self.index.source_finder.sources(queries, watched.sinks, own_keys, sequence.request.sources)

    def _pass(self, fed: list[Fed]) -> torch.Tensor:
        """Run a forward pass; return its logits [B, V].

        Stores the retrieval heads' queries of each sequence that gets an answer token by this pass and whose sources
        are requested.
        """
        logits = self._logits(fed)
        if self.cache.watched is not None:
            sequences = ((place, one, self.active[one.slot]) for place, one in enumerate(fed))
            wanted = [(place, one) for place, fed, one in sequences if one.request.sources and one.chooses(fed)]
            if wanted:
                places, asking = zip(*wanted, strict=True)
                for sequence, queries in zip(asking, self.cache.watched.of(places), strict=True):
                    sequence.queries.append(queries)
        return logits

    def _logits(self, fed: list[Fed]) -> torch.Tensor:
        """Run a forward pass; return the logits [B, V] of its sequences. The next decode step may overwrite them."""
        if any(one.asks for one in fed):
            return self.ask(fed)
        newest = torch.tensor([one.tokens[0] for one in fed])
        return self.step(fed, newest, max(self.active[one.slot].most for one in fed))

    def ask(self, fed: list[Fed]) -> torch.Tensor:
        """Run a pass with tokens of questions; return the logits [B, V] after each sequence's last token.

        Call this method within `running`.
        """
        ids, positions = self.cache.questions_input(fed, self.index.split.tokens)
        ends = sent(torch.tensor([len(one.tokens) for one in fed]).cumsum(0), ids.device)
        logits: torch.Tensor = self.index.model(
            input_ids=ids,
            position_ids=positions,
            **with_cache(self.index.model, self.cache),
            logits_to_keep=ends - 1,
        ).logits[0]
        return logits

    def _choose(self, logits: torch.Tensor, slots: list[int]) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        """Choose the next token of each sequence from its logits [B, V], by sampling or as the argmax.

        Returns the tokens, and the log-probabilities for requests with `logprobs`. A token is None if the sequence's
        logits are not finite.
        """
        scores = self.index.agreed(logits.to(torch.float32, copy=True))
        highest, best = scores.max(-1)
        tokens, finite = torch.stack([best, highest.isfinite()]).tolist()
        sampled: dict[Sampling, list[int]] = {}
        for place, slot in enumerate(slots):
            if finite[place] and (sampling := self.active[slot].request.sampling).temperature:
                sampled.setdefault(sampling, []).append(place)
        for sampling, places in sampled.items():
            drawn = draw(scores[places], sampling, [self.active[slots[place]].random for place in places])
            for place, token in zip(places, drawn, strict=True):
                tokens[place] = token
        wanted = {place: self.active[slot].request.logprobs for place, slot in enumerate(slots) if finite[place]}
        found = token_logprobs(scores, tokens, {place: top for place, top in wanted.items() if top is not None})
        chosen = [token if one else None for token, one in zip(tokens, finite, strict=True)]
        return chosen, [found.get(place) for place in range(len(slots))]

    def _read(self) -> tuple[float, int]:
        """Return how many rows were read for all sequences so far, and how many dense attention would have read.

        The first call after a step needs one sync.
        """
        if self.read is None:
            counts = self.cache.reads
            self.read = total_read(counts), sum(count.dense for count in counts)
        return self.read

    def _answer(self, done: Sequence) -> Answer:
        read, dense = (now - before for now, before in zip(self._read(), done.read_before, strict=True))
        counted = bool(self.cache.reads)
        answer = answer_of(
            self.index,
            done.answer,
            done.prompt_tokens,
            (done.started, done.first or done.started, done.last),
            read_share(read, dense, counted=counted) if len(done.answer) > 1 or not counted else None,
            self.cache.stats(),
        )
        interrupted = done.stopped and answer.finish_reason == "length"
        return replace(answer, finish_reason="interrupted") if interrupted else answer


def token_logprobs(scores: torch.Tensor, tokens: list[int], tops: dict[int, int]) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of the chosen and of the likeliest tokens, for each row whose index is in `tops`.

    Allocates two copies of these rows.

    Args:
        scores: [B, V] float32, the logits.
        tokens: the token that was chosen in each row.
        tops: number of likeliest tokens to return, by row index.
    """
    if not tops:
        return {}
    logprobs = scores[[*tops]].log_softmax(-1)
    chosen = torch.tensor([tokens[row] for row in tops], device=scores.device)
    own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    best, ids = (one.tolist() for one in logprobs.topk(min(max(tops.values()), scores.shape[1])))
    return {
        row: TokenLogprobs(tokens[row], own[at], tuple(zip(ids[at][:top], best[at][:top], strict=True)))
        for at, (row, top) in enumerate(tops.items())
    }


def generate(
    index: OpenIndex,
    cache: IndexCache,
    question: torch.Tensor,
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
    stop: Callable[[], bool] | None = None,
    sources: int = 0,
    prefilled: PrefilledQuestion | None = None,
) -> Answer:
    """Answer one question. The cache is rewound first, so one cache serves many questions.

    Other threads that use the model wait until the answer is complete. A failed question does not affect the answer to
    the next question.

    Args:
        question: [Q] token ids after the stored prompt. Only these tokens are prefilled.
        on_text, stop, sources, prefilled: as in `Request`.

    Raises:
        UsageError: an argument is not valid, no position of the model is left for an answer, or sources are requested
            from a cache that moves an answer's tokens into the index.
        NotFiniteError: the model's logits are not finite. Also raises the errors of `exclusive`.
    """
    with exclusive(index.model):
        cache.rewind()
        return Engine(index, cache).answer(
            Request(question, sampling, on_text, stop, sources=sources, prefilled=prefilled), index.split.tokens
        )


@torch.inference_mode()
def prefill_question(index: OpenIndex, cache: IndexCache, question: torch.Tensor) -> PrefilledQuestion:
    """Prefill a question [Q] after the stored prompt, for answers over other caches of the index. Rewinds the cache.

    A cache can answer from the result if `divides_questions` returns True for its layers.

    Args:
        cache: a cache for dense attention.

    Raises:
        UsageError: no position of the model is left for an answer. Also raises the errors of `exclusive`.
    """
    started, end = time.perf_counter(), index.split.tokens + len(question)
    answer_room(index, end)
    with exclusive(index.model):
        cache.rewind()
        cache.expect_prompt(end)
        engine, fed = Engine(index, cache), Fed(0, 0, question.tolist(), asks=True)
        with engine.running() as cores:
            cores.follow()
            logits = engine.ask([fed])[0].cpu()
        rows = cache.kept(0, len(question)).to(logits.device)
    return PrefilledQuestion(rows, logits, time.perf_counter() - started)


def answer_after(index: OpenIndex, cache: IndexCache, before: torch.Tensor, request: Request) -> Answer:
    """Answer a question that follows the tokens `before`. Call it within `exclusive`.

    All tokens except the last one of the answer stay in the cache.

    Args:
        before: [N] token ids of the stored prompt and of all earlier turns. If the cache lacks the last token, that
            token is prefilled with the question.

    Raises:
        SparsekvError: the number of tokens in the cache does not match `before`. Also raises the errors of `generate`.
    """
    cache.check_length(len(before))
    held = cache.get_seq_length()
    prompt = torch.cat([before[held:], request.question])
    return Engine(index, cache).answer(replace(request, question=prompt), held)
