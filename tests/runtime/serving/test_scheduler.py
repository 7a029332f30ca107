"""Requests over two indices that come and go: each that ends by itself has the answer that it gets alone."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.odd_numbers import logits_full_of
from support.served import ALL, LENGTHS, OWN, Served, check, ids, question, text

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.engine import NotFiniteError
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.threads import exclusive
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.serving.lane import CHUNK
from sparsekv.runtime.serving.scheduler import Scheduler
from sparsekv.runtime.serving.stream import QueueFullError, Stream, Submission

Make = Callable[..., Scheduler]


@contextmanager
def before_steps(served: Served, called: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Within the context `called` gets the token ids of each forward pass, before it."""
    model = served.indices["a"].model
    handle = model.register_forward_pre_hook(lambda _, __, given: called(given["input_ids"]), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def test_32_requests_over_two_indices_are_answered_as_each_alone(served: Served, make: Make) -> None:
    scheduler = make(slots=5)
    asked = [("ab"[number % 2], question(number)) for number in range(32)]
    streams = [served.ask(scheduler, *one) for one in asked]
    for stream, one in zip(streams, asked, strict=True):
        check(list(stream), served.alone(*one))
    measures = scheduler.measures()
    assert (measures.waiting, measures.running, measures.answers) == (0, 0, 32)
    assert measures.answer_tokens == sum(served.alone(*one).generated_tokens for one in asked)


@pytest.mark.parametrize("config", [OWN, DecodeConfig(Dense())], ids=["own", "dense"])
def test_other_configs(served: Served, make: Make, config: DecodeConfig) -> None:
    scheduler = make(slots=3)
    asked = [("ab"[number % 2], question(number)) for number in range(8)]
    streams = [served.ask(scheduler, *one, config=config) for one in asked]
    for stream, one in zip(streams, asked, strict=True):
        check(list(stream), served.alone(*one, config=config))


def test_an_answer_without_a_decode_step_does_not_change_the_share_that_steps_read(served: Served, make: Make) -> None:
    scheduler, config = make(), replace(ALL, budget=Budget(0.2))
    assert scheduler.measures().kv_fraction == 0
    usage = list(served.ask(scheduler, "a", question(0), 12, config=config))[-1].usage
    assert usage is not None
    for number in range(3):
        list(served.ask(scheduler, "a", question(number), 1, config=config))
    assert 0 < usage.kv_fraction < 1
    assert scheduler.measures().kv_fraction == pytest.approx(usage.kv_fraction)


def test_requests_that_cannot_share_steps_are_answered_one_after_another(served: Served, make: Make) -> None:
    """Beside others that can."""
    scheduler, gauged = make(), replace(ALL, gauge=True)
    asked = [("a", question(number)) for number in (0, 1, 5)]  # the last one takes more than one step
    streams = [served.ask(scheduler, *one, config=config) for one in asked for config in (gauged, ALL)]
    for number, stream in enumerate(streams):
        check(list(stream), served.alone(*asked[number // 2]))


def test_a_long_question_holds_up_others_by_a_step_of_its_part(served: Served, make: Make) -> None:
    scheduler, long, fed = make(), torch.cat([question(5), question(11)]), list[int]()
    with before_steps(served, lambda ids: fed.append(ids.numel())), exclusive(served.indices["a"].model):
        streams = [served.ask(scheduler, "a", one, 12) for one in (question(0), question(1), long)]
    with before_steps(served, lambda ids: fed.append(ids.numel())):
        for stream in streams:
            list(stream)
    assert len(long) > 2 * CHUNK
    assert CHUNK - 2 <= max(fed) <= CHUNK + 2
    assert sum(one > 100 for one in fed) == 3


def test_a_cancelled_request_ends_and_frees_its_slot(served: Served, make: Make) -> None:
    scheduler = make(slots=1)
    first, second = (served.ask(scheduler, "a", question(4), longest) for longest in (1000, 8))
    for _ in zip(first, range(3), strict=False):  # leaves the iterator after a few pieces
        pass
    del first
    check(list(second), served.alone("a", question(4)))


def test_a_cancelled_request_says_so(served: Served, make: Make) -> None:
    scheduler = make(slots=1)
    with exclusive(served.indices["a"].model):
        streams = [served.ask(scheduler, "a", question(number)) for number in (0, 1, 2)]
        streams[1].cancel()
    pieces = [list(stream) for stream in streams]
    check(pieces[0], served.alone("a", question(0)))
    assert (pieces[1][-1].finish, text(pieces[1])) == ("cancelled", "")
    check(pieces[2], served.alone("a", question(2)))


def test_a_timeout_ends_an_answer_where_it_is(served: Served, make: Make) -> None:
    scheduler = make(slots=1)
    pieces = list(served.ask(scheduler, "a", question(4), 4000, timeout=0.3))
    assert pieces[-1].finish == "timeout"
    found = ids(pieces)
    assert served.alone("a", question(4)).ids[: len(found)] == found[:8]
    with exclusive(served.indices["a"].model):
        waiting = served.ask(scheduler, "a", question(4), timeout=1e-3)
        threading.Event().wait(0.01)
    assert [(one.finish, one.tokens) for one in waiting] == [("waited", ())]


def test_a_full_queue_refuses_and_says_when_to_come_back(served: Served, make: Make) -> None:
    scheduler = make(slots=2, queue=3)
    scheduler.warm_up("a", ALL)
    with exclusive(served.indices["a"].model):
        streams = [served.ask(scheduler, "a", question(number)) for number in range(5)]
        assert (scheduler.measures().waiting, scheduler.measures().running) == (3, 2)
        with pytest.raises(QueueFullError) as refused:
            served.ask(scheduler, "a", question(5))
        with pytest.raises(QueueFullError):
            served.ask(scheduler, "b", question(5))
    assert 1 <= refused.value.retry_after <= 60
    for number, stream in enumerate(streams):
        check(list(stream), served.alone("a", question(number)))
    check(list(served.ask(scheduler, "a", question(5))), served.alone("a", question(5)))


def test_requests_of_lanes_that_are_not_open_fill_the_queue(served: Served, make: Make) -> None:
    scheduler = make(slots=2, queue=3)
    configs = [replace(ALL, budget=Budget(0.9 + number / 100)) for number in range(4)]
    with exclusive(served.indices["a"].model):
        streams = [served.ask(scheduler, "a", question(0), config=config) for config in configs[:3]]
        assert (scheduler.measures().waiting, scheduler.measures().running) == (3, 0)
        with pytest.raises(QueueFullError):
            served.ask(scheduler, "a", question(0), config=configs[3])
    for stream, config in zip(streams, configs, strict=False):
        check(list(stream), served.alone("a", question(0), config=config))
    assert scheduler.measures().waiting == 0


def test_requests_of_a_lane_that_drains_wait(served: Served, make: Make) -> None:
    scheduler, steps = make(slots=2, lanes=1), threading.Semaphore(0)
    running = served.ask(scheduler, "a", question(4), 4000)
    pieces = iter(running)
    next(pieces)
    other = served.ask(scheduler, "b", question(0))
    with before_steps(served, lambda _: steps.release()):
        for _ in range(3):  # then the lane of a drains, because no other lane can be open
            assert steps.acquire(timeout=60)
    late = served.ask(scheduler, "a", question(0))
    assert (scheduler.measures().waiting, scheduler.measures().running) == (2, 1)
    running.cancel()
    check(list(other), served.alone("b", question(0)))
    check(list(late), served.alone("a", question(0)))


def test_a_failed_step_ends_the_requests_in_it_and_no_others(served: Served, make: Make) -> None:
    scheduler, steps = make(slots=2), list[int]()

    def fail(ids: torch.Tensor) -> None:
        steps.append(ids.numel())
        if len(steps) == 4:
            raise RuntimeError("a cable came off")

    with exclusive(served.indices["a"].model):
        streams = [served.ask(scheduler, "a", question(number)) for number in range(4)]
    with before_steps(served, fail):
        outcomes = [_outcome(stream) for stream in streams]
    failed = [isinstance(one, RuntimeError) for one in outcomes]
    assert sum(failed) in (1, 2)  # the steps before the hook was there may have ended one
    for number, one in enumerate(outcomes):
        if not failed[number]:
            check(one, served.alone("a", question(number)))
    assert not any(lane.running for lane in scheduler._lanes)


def test_memory_that_does_not_suffice_is_told(served: Served, make: Make) -> None:
    scheduler = make()

    def fail(ids: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no more")

    with before_steps(served, fail):
        assert isinstance(_outcome(served.ask(scheduler, "a", question(0))), torch.OutOfMemoryError)
    check(list(served.ask(scheduler, "a", question(0))), served.alone("a", question(0)))


def test_logits_that_are_not_finite_end_their_request(served: Served, make: Make) -> None:
    scheduler = make()
    with logits_full_of(served.indices["a"].model, torch.nan):
        assert isinstance(_outcome(served.ask(scheduler, "a", question(0))), NotFiniteError)
    check(list(served.ask(scheduler, "a", question(0))), served.alone("a", question(0)))


def test_an_index_whose_cache_cannot_be_made_fails_its_requests_alone(served: Served) -> None:
    def make_cache(index: Any, config: DecodeConfig) -> Any:
        if index is served.indices["b"]:
            raise OSError("the disk is gone")
        return index.cache(config)

    scheduler = Scheduler(served.indices, make_cache=make_cache)
    streams = [served.ask(scheduler, name, question(number)) for number, name in enumerate("abab")]
    for number, stream in enumerate(streams):
        if number % 2:
            assert isinstance(_outcome(stream), OSError)
        else:
            check(list(stream), served.alone("a", question(number)))
    scheduler.close(0)


def _outcome(stream: Stream) -> Any:
    try:
        return list(stream)
    except Exception as error:
        assert list(stream) == []  # it has ended
        return error


@pytest.mark.parametrize("room", [{"lanes": 1}, {"memory": 0}], ids=["lanes", "memory"])
def test_lanes_that_have_no_room_together_take_turns(served: Served, make: Make, room: dict[str, int]) -> None:
    """One after another, for there is room for one; long ones wait for no one for ever."""
    scheduler = make(slots=2, **room)
    asked = [("ab"[number % 2], question(number)) for number in range(10)]
    streams = [served.ask(scheduler, *one) for one in asked]
    for stream, one in zip(streams, asked, strict=True):
        check(list(stream), served.alone(*one))
    assert sum(lane.engine is not None for lane in scheduler._lanes) == 1


@pytest.mark.parametrize("lanes", [1, 2])
def test_lanes_are_opened_once_in_the_order_of_their_requests(served: Served, lanes: int) -> None:
    made, configs = [], [replace(ALL, budget=Budget(0.9 + number / 100)) for number in range(5)]

    def make_cache(index: OpenIndex, config: DecodeConfig) -> IndexCache:
        made.append(config)
        return index.cache(config)

    scheduler = Scheduler(served.indices, lanes=lanes, make_cache=make_cache)
    with exclusive(served.indices["a"].model):
        streams = [served.ask(scheduler, "a", question(0), config=config) for config in configs]
    for stream in streams:
        list(stream)
    scheduler.close(0)
    assert made == configs


def test_what_cannot_be_answered_is_refused_at_once(served: Served, make: Make) -> None:
    scheduler = make()
    for changes, reason in [
        ({"index": "c"}, "choose one of a, b"),
        ({"tokens": torch.tensor([], dtype=torch.int64)}, "no tokens"),
        ({"tokens": torch.tensor([1 << 20])}, "does not have"),
        ({"tokens": torch.ones(1 << 14, dtype=torch.int64)}, "positions"),
        ({"timeout": 0.0}, "timeout"),
        ({"stop": ("",)}, "stop string"),
        ({"logprobs": -1}, "log-prob"),
    ]:
        with pytest.raises(UsageError, match=reason):
            scheduler.submit(replace(Submission("a", ALL, question(0), Sampling(8)), **changes))  # type: ignore[arg-type]


def test_a_question_for_which_no_memory_is_planned_is_refused(
    served: Served, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsekv.runtime.serving.lane._memory", lambda device: 3 << 20)
    monkeypatch.setattr("sparsekv.runtime.serving.lane.OWN_TOKENS", 100)
    scheduler = make(slots=8)
    with pytest.raises(UsageError, match=r"memory .* --batch-size, or in Python use `ask`"):
        list(served.ask(scheduler, "a", question(5)))
    short = list(served.ask(scheduler, "a", question(0), 4000))
    assert short[-1].finish == "length"
    (lane,) = scheduler._lanes
    assert lane.slots < 8
    assert lane.engine is not None
    assert 100 <= len(question(0)) + len(ids(short)) == lane.engine.own_tokens
    check(list(served.ask(scheduler, "a", question(0))), served.alone("a", question(0)))


def test_closing_lets_answers_end_within_its_time(served: Served) -> None:
    scheduler = Scheduler(served.indices)
    stream = served.ask(scheduler, "a", question(0))
    scheduler.close(60)
    check(list(stream), served.alone("a", question(0)))
    with pytest.raises(UsageError, match="shutting down"):
        served.ask(scheduler, "a", question(0))
    scheduler = Scheduler(served.indices)
    stream = served.ask(scheduler, "a", question(4), 4000)
    scheduler.close(0)
    assert list(stream)[-1].finish == "cancelled"


@pytest.mark.parametrize("config", [ALL, replace(ALL, gauge=True)], ids=["shared", "alone"])
def test_an_index_is_warmed_up_before_its_first_request(served: Served, make: Make, config: DecodeConfig) -> None:
    """If there is room; no request is counted, and answers are the same."""
    scheduler = make(lanes=1)
    for name in "ab":
        scheduler.warm_up(name, config)
    assert [lane.index for lane in scheduler._lanes if lane.engine is not None] == [served.indices["a"]]
    assert scheduler.measures().answers == 0
    for number in range(3):
        check(list(served.ask(scheduler, "a", question(number), config=config)), served.alone("a", question(number)))


def test_the_documents_that_fit_into_the_memory_stay(served: Served, make: Make) -> None:
    memory = sum(one.document_bytes for one in served.indices.values())
    scheduler = make(memory=memory)
    for name, config in (("a", ALL), ("b", ALL), ("a", ALL), ("b", OWN), ("a", ALL)):
        check(list(served.ask(scheduler, name, question(0), config=config)), served.alone(name, question(0)))
    opened = [(lane.index, lane.config) for lane in scheduler._lanes if lane.engine is not None]
    assert opened == [(served.indices["a"], ALL), (served.indices["b"], OWN)]


def test_indices_come_and_go(served: Served) -> None:
    scheduler = Scheduler({"a": served.indices["a"]})
    with pytest.raises(UsageError, match="choose one of a"):
        served.ask(scheduler, "b", question(0))
    scheduler.add("b", served.indices["b"])
    streams = [served.ask(scheduler, name, question(0)) for name in "ab"]
    scheduler.remove("b")
    for name, stream in zip("ab", streams, strict=True):
        check(list(stream), served.alone(name, question(0)))
    scheduler.remove("a")
    with pytest.raises(UsageError, match="there is no index b; add it before it is asked"):
        served.ask(scheduler, "b", question(0))
    scheduler.close(60)
    assert max(LENGTHS) > CHUNK
