"""Threads and tasks that share a model: each answer is the one that is given with nobody else about, or is refused."""

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from support.engines import packed
from support.short_part import short_part

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.attention.plan import Appender
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import Request
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.perplexity import perplexity
from sparsekv.runtime.decoding.session import Conversation, Session
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec
from sparsekv.runtime.tracing.trace import TracedIndex

QUESTIONS = ("What is an assertion?", "And what raises one? Say it in a few words.", "Why?", "Which one came first?")
SAMPLINGS = (Sampling(5), Sampling(4, temperature=1.0, seed=3), Sampling(5, temperature=0.8, top_k=9, seed=4))
METHODS: dict[str, Method | None] = {
    "squeezed": Squeezed(),
    "codes": Codes(),
    "snapkv": SnapKV(window_queries=4),
    "multipole": Multipole(stream=True, buffer=4),
    "dense": None,
}
IN_BATCHES = ("squeezed", "codes", "dense")
WITHIN = r"asked a question, read a stream or opened an index in the middle of an answer"


class CallbackError(Exception):
    """The exception that a caller's own function raises."""


def setting(name: str) -> DecodeConfig:
    method = METHODS[name]
    return DecodeConfig(Dense()) if method is None else DecodeConfig(MethodSpec(name, "", method), Budget(0.3))


def asker(index: OpenIndex, name: str) -> Session:
    return Session.open(index, replace(setting(name), ahead=name == "squeezed"))


@dataclass
class Alone:
    """Answers that are given with nothing else under way, each over a cache of its own."""

    index: OpenIndex
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def ids(self, name: str, question: str, sampling: Sampling) -> list[int]:
        key = name, question, sampling
        if key not in self.known:
            self.known[key] = asker(self.index, name).ask(question, sampling).ids
        return self.known[key]

    def together(self, name: str, sampling: Sampling) -> list[list[int]]:
        key = name, sampling
        if key not in self.known:
            self.known[key] = [one.ids for one in batcher(self.index, name).ask_all(QUESTIONS, sampling, together=2)]
        return self.known[key]

    def talk(self, name: str) -> list[list[int]]:
        if name not in self.known:
            self.known[name] = [Conversation(self.index, setting(name)).ask(QUESTIONS[0], SAMPLINGS[0]).ids]
        return self.known[name]


def batcher(index: OpenIndex, name: str) -> Session:
    return Session.open(index, setting(name))


@pytest.fixture(scope="module")
def alone(full_index: OpenIndex) -> Alone:
    return Alone(full_index)


def breaks_off(after: int) -> Callable[[str], None]:
    """An `on_text` that raises at its call of this number."""
    calls = iter(range(after))

    def on_text(text: str) -> None:
        if next(calls, None) is None:
            raise CallbackError

    return on_text


class Deeds:
    """Random actions of one thread on sessions that all threads share. Each compares its answer with the answer given
    alone."""

    def __init__(self, alone: Alone, askers: dict[str, Session], batchers: dict[str, Session], draw: random.Random):
        self.alone, self.askers, self.batchers, self.draw = alone, askers, batchers, draw

    def one(self) -> tuple[str, str, Sampling]:
        return self.draw.choice(list(METHODS)), self.draw.choice(QUESTIONS), self.draw.choice(SAMPLINGS)

    def ask(self) -> None:
        name, question, sampling = self.one()
        text: list[str] = []
        answer = self.askers[name].ask(question, sampling, text.append)
        assert answer.ids == self.alone.ids(name, question, sampling)
        assert "".join(text) == answer.text

    def ask_and_break_off(self) -> None:
        name, question, sampling = self.one()
        with suppress(CallbackError):
            self.askers[name].ask(question, sampling, breaks_off(self.draw.randrange(6)))

    def ask_and_stop(self) -> None:
        name, question, sampling = self.one()
        steps = iter(range(self.draw.randrange(5)))
        answer = self.askers[name].ask(question, sampling, stop=lambda: next(steps, None) is None)
        whole = self.alone.ids(name, question, sampling)
        assert answer.ids == whole[: len(answer.ids)]
        assert answer.finish_reason == "interrupted" or answer.ids == whole

    def ask_within(self) -> None:
        name, question, sampling = self.one()
        other = self.askers[self.draw.choice(list(METHODS))]

        def on_text(text: str) -> None:
            with pytest.raises(UsageError, match=WITHIN):
                other.ask(QUESTIONS[2])

        assert self.askers[name].ask(question, sampling, on_text).ids == self.alone.ids(name, question, sampling)

    def ask_all(self) -> None:
        name, sampling = self.draw.choice(IN_BATCHES), self.draw.choice(SAMPLINGS)
        answers = self.batchers[name].ask_all(QUESTIONS, sampling, together=2)
        assert [one.ids for one in answers] == self.alone.together(name, sampling)

    def leave_a_batch(self) -> None:
        name, sampling = self.draw.choice(IN_BATCHES), self.draw.choice(SAMPLINGS)
        shared = self.batchers[name]
        requests = [Request(question_ids(shared.index, question), sampling) for question in QUESTIONS]
        answers = packed(shared.index, shared.cache, 2).answers(requests)
        with suppress(UsageError):
            for _ in range(self.draw.randrange(5)):
                number, answer = next(answers, (0, None))
                assert answer is None or answer.ids == self.alone.together(name, sampling)[number]

    def talk(self) -> None:
        name = self.draw.choice(list(METHODS))
        talk = Conversation(self.alone.index, setting(name))
        with suppress(CallbackError):
            talk.ask(QUESTIONS[1], SAMPLINGS[0], breaks_off(self.draw.randrange(3)))
            talk.forget()
        assert talk.turns == []
        assert [talk.ask(QUESTIONS[0], SAMPLINGS[0]).ids] == self.alone.talk(name)

    def ask_in_a_task(self) -> None:
        name, question, sampling = self.one()
        ask = partial(self.askers[name].ask, question, sampling)

        async def main() -> None:
            with suppress(TimeoutError):
                answer = await asyncio.wait_for(asyncio.to_thread(ask), self.draw.choice((0.0, 0.01, 0.05, 5.0)))
                assert answer.ids == self.alone.ids(name, question, sampling)
            answer = await asyncio.to_thread(ask)
            assert answer.ids == self.alone.ids(name, question, sampling)

        asyncio.run(main())


DEEDS = (
    Deeds.ask,
    Deeds.ask_and_break_off,
    Deeds.ask_and_stop,
    Deeds.ask_within,
    Deeds.ask_all,
    Deeds.leave_a_batch,
    Deeds.talk,
    Deeds.ask_in_a_task,
)


@pytest.mark.parametrize("seed", short_part(range(4), every=4))
def test_threads_that_share_askers_get_the_answers_that_are_given_alone(alone: Alone, seed: int) -> None:
    index = alone.index
    draw, own = random.Random(seed), index.model.config._attn_implementation
    askers = {name: asker(index, name) for name in METHODS}
    batchers = {name: batcher(index, name) for name in IN_BATCHES}
    count = draw.randrange(2, 5)
    everyone = Barrier(count)

    def run(number: int) -> None:
        deeds = Deeds(alone, askers, batchers, random.Random(f"{seed} {number}"))
        everyone.wait()
        for _ in range(4):
            deeds.draw.choice(DEEDS)(deeds)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(run, range(count)))
    assert index.model.config._attn_implementation == own
    for name in METHODS:
        assert askers[name].ask(QUESTIONS[0], SAMPLINGS[0]).ids == alone.ids(name, QUESTIONS[0], SAMPLINGS[0])


def test_a_second_question_never_prefills_the_document(full_index: OpenIndex) -> None:
    """Whatever wrote to the cache: a length that does not fit is an error, before transformers sees it."""
    asked, tokens = asker(full_index, "squeezed"), full_index.split.tokens
    for layers in (asked.cache.stored_layers, asked.cache.stored_layers[1:]):
        asked.cache.rewind()
        asked.cache.check_length(tokens)
        for layer in layers:
            rows = layer.keys[None, :, :3]
            layer.update(rows, rows)
        with pytest.raises(SparsekvError, match=f"the cache has .*{tokens + 3} tokens, and the question begins after"):
            asked.cache.check_length(tokens)
    assert asked.ask(QUESTIONS[0], SAMPLINGS[0]).ids == asked.ask(QUESTIONS[0], SAMPLINGS[0]).ids


def test_samples_do_not_depend_on_other_random_numbers_of_the_process(alone: Alone) -> None:
    """Another thread's, or those that the caller's own function takes: torch has one generator for all threads."""
    shared, sampling = asker(alone.index, "dense"), SAMPLINGS[1]
    expected = alone.ids("dense", QUESTIONS[0], sampling)
    before = torch.manual_seed(99).get_state()
    assert shared.ask(QUESTIONS[0], sampling).ids == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert shared.ask(QUESTIONS[0], sampling, stop=lambda: bool(torch.rand(1) > 1)).ids == expected


def test_a_callback_may_not_call_the_model_that_answers(alone: Alone) -> None:
    """Its attention is the answer's: rows of another prompt would go into the answer's cache."""
    model, refused = alone.index.model, []

    def on_text(text: str) -> None:
        with pytest.raises(RuntimeError, match="is answering over an index"):
            model(torch.tensor([[1, 2, 3]]))
        refused.append(text)

    answer = asker(alone.index, "squeezed").ask(QUESTIONS[0], SAMPLINGS[0], on_text)
    assert refused
    assert answer.ids == alone.ids("squeezed", QUESTIONS[0], SAMPLINGS[0])


def test_another_thread_may_not_call_the_model_that_answers(alone: Alone) -> None:
    """Nor one that has a copy of the answer's context, as asyncio.to_thread gives it."""
    model, asked, refused = alone.index.model, Event(), Event()

    def call() -> None:
        asked.wait()
        with pytest.raises(RuntimeError, match="is answering over an index"):
            model(torch.tensor([[1, 2, 3]]))
        refused.set()

    def attend(call: object) -> torch.Tensor:
        asked.set()
        assert refused.wait(60)
        raise CallbackError

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(call)
        with pytest.raises(CallbackError), route_attention(model, attend):
            model(torch.tensor([[1]]))
        other.result()


@pytest.mark.thinned
@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, CallbackError])
@pytest.mark.parametrize("name", METHODS)
def test_an_answer_that_failed_leaves_the_next_one_as_it_was(
    alone: Alone, name: str, failure: type[BaseException]
) -> None:
    def on_text(text: str) -> None:
        raise failure

    shared = asker(alone.index, name)
    with pytest.raises(failure):
        shared.ask(QUESTIONS[1], SAMPLINGS[0], on_text)
    again = shared.ask(QUESTIONS[0], SAMPLINGS[0])
    assert again.ids == alone.ids(name, QUESTIONS[0], SAMPLINGS[0])
    assert again.kv_fraction == asker(alone.index, name).ask(QUESTIONS[0], SAMPLINGS[0]).kv_fraction


def test_rows_that_were_interrupted_while_they_moved_are_told(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come when an index has its new tokens and the rows have not been laid out for them."""

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    shared = asker(alone.index, "multipole")
    with monkeypatch.context() as changed:
        changed.setattr(Appender, "_append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shared.ask(QUESTIONS[0], Sampling(20))
    with pytest.raises(SparsekvError, match="open a new session"):
        shared.ask(QUESTIONS[0], SAMPLINGS[0])


def test_a_batch_that_another_question_came_into_is_refused(alone: Alone) -> None:
    index, shared = alone.index, batcher(alone.index, "squeezed")
    lengths = (3, 8, 5)  # the first to end leaves another half-way
    requests = [
        Request(question_ids(index, question), replace(SAMPLINGS[0], max_new_tokens=length))
        for question, length in zip(QUESTIONS, lengths, strict=False)
    ]
    expected = dict(packed(index, batcher(index, "squeezed").cache, 2).answers(requests))
    engine = packed(index, shared.cache, 2)
    first = engine.answers(requests)
    number, answer = next(first)
    assert answer.ids == expected[number].ids
    second = dict(engine.answers(requests))  # the same object, whose sequences the first left half-way
    assert [second[place].ids for place in range(len(requests))] == [expected[place].ids for place in range(3)]
    with pytest.raises(UsageError, match="another question was asked between two answers of a batch"):
        list(first)


@pytest.mark.parametrize("deed", ["batch", "talk", "forget", "switch", "trace", "perplexity", "asker"])
def test_nothing_that_runs_the_model_is_called_by_a_callback(alone: Alone, deed: str) -> None:
    index, other = alone.index, batcher(alone.index, "squeezed")
    talk, ids = Conversation(index, setting("dense")), question_ids(index, QUESTIONS[0])
    deeds: dict[str, Callable[[], object]] = {
        "batch": lambda: other.ask_all(QUESTIONS),
        "talk": lambda: talk.ask(QUESTIONS[0], SAMPLINGS[0]),
        "forget": talk.forget,
        "switch": lambda: talk.switch(setting("squeezed")),
        "trace": lambda: TracedIndex(index, setting("squeezed")).trace(ids, 3),
        "perplexity": lambda: perplexity(index, other.cache, ids),
        "asker": lambda: asker(index, "dense"),
    }
    refused: list[str] = []

    def on_text(text: str) -> None:
        with pytest.raises(UsageError, match=WITHIN):
            deeds[deed]()
        refused.append(text)

    answer = asker(index, "codes").ask(QUESTIONS[0], SAMPLINGS[0], on_text)
    assert refused
    assert answer.ids == alone.ids("codes", QUESTIONS[0], SAMPLINGS[0])
