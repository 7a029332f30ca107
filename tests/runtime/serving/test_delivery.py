"""Delivery of an answer: text up to a stop string, token ids, log-probabilities; to threads and to tasks."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import inf

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.served import ALL, Served, check, ids, question, text
from support.small_index import plain_logits_after
from support.tokenizers_of_families import tokenizer_of

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.api import StreamingSession
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.engine import Sequence
from sparsekv.runtime.serving.lane import Job, StoppedText
from sparsekv.runtime.serving.messages import Message, conversation_tokens
from sparsekv.runtime.serving.scheduler import Scheduler
from sparsekv.runtime.serving.stream import Channel, Piece, Stream, Submission

Make = Callable[..., Scheduler]


@given(
    parts=st.lists(st.text("abc", max_size=4)),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_at_the_first_stop_string_whatever_the_pieces(parts: list[str], stops: list[str]) -> None:
    found, out = StoppedText(tuple(stops)), ""
    for number, part in enumerate(parts):
        out += found.put(part)
        so_far = "".join(parts[: number + 1])
        assert found.found == any(stop in so_far for stop in stops)
        assert so_far.startswith(out)
        assert not any(stop in out for stop in stops)
        if not found.found:  # no more is held back than may begin a stop string
            held = so_far[len(out) :]
            assert not held or any(stop.startswith(held) for stop in stops)
    if not found.found:
        assert out + found.end() == "".join(parts)


def test_an_answer_ends_at_a_stop_string(served: Served, make: Make) -> None:
    answer = served.alone("a", question(1), 60)
    middle = len(answer.text) // 2
    scheduler = make()
    for length in (1, 2, 5):
        stop = answer.text[middle : middle + length]
        pieces = list(served.ask(scheduler, "a", question(1), 60, stop=("never seen", stop)))
        assert text(pieces) == answer.text[: answer.text.index(stop)]
        assert pieces[-1].finish == "stop"
        tokens = ids(pieces)
        assert tokens == answer.ids[: len(tokens)]
        assert stop in str(served.indices["a"].tokenizer.decode(tokens))
        assert len(tokens) < 60
    pieces = list(served.ask(scheduler, "a", question(1), 60, stop=("never seen",)))
    check(pieces, answer)


def test_the_first_bytes_of_a_character_are_no_stop_string(served: Served) -> None:
    index = served.indices["a"]
    tokens = index.tokenizer("\U0001f600", add_special_tokens=False).input_ids
    job = Job(Submission("a", ALL, question(1), Sampling(60), ("\ufffd",)), index, lambda job: None)
    job.sequence = Sequence(index, job.engine_request(), 0, 60)
    assert [job.sequence.take(token, None, set()) for token in tokens] == [False] * len(tokens)
    assert not job.text.found


def test_an_answer_ends_at_a_stop_string_in_a_run_of_bytes(served: Served) -> None:
    """The run's text waits for its end, for an invalid byte would make it other text."""
    tokenizer = tokenizer_of("llama-2")
    index, known = replace(served.indices["a"], tokenizer=tokenizer), tokenizer.get_vocab()
    job = Job(Submission("a", ALL, question(1), Sampling(60), ("\n\n",)), index, lambda job: None)
    job.sequence = Sequence(index, job.engine_request(), 0, 60)
    tokens = [known[one] for one in ("def", "<0x0A>", "<s>", "<0x0A>")]
    assert [job.sequence.take(token, None, set()) for token in tokens] == [False, False, False, True]
    assert job.text.found


def test_an_answer_ends_at_a_special_token_that_is_a_stop_string(served: Served, make: Make) -> None:
    """Its text is no part of the answer's."""
    index, scheduler = served.indices["a"], make()
    special = {number: token.content for number, token in index.tokenizer.added_tokens_decoder.items()}

    def drawn(seed: int, *stop: str) -> list[Piece]:
        sampling = Sampling(60, temperature=2.0, seed=seed)
        return list(scheduler.submit(Submission("a", ALL, question(1), sampling, stop)))

    answers = ((seed, ids(drawn(seed))) for seed in range(20))
    seed, whole = next((seed, tokens) for seed, tokens in answers if special.keys() & set(tokens[:-1]))
    place = next(place for place, token in enumerate(whole) if token in special)
    pieces = drawn(seed, "never seen", special[whole[place]])
    assert ids(pieces) == whole[: place + 1]
    assert text(pieces) == index.tokenizer.decode(whole[:place])
    assert pieces[-1].finish == "stop"


@pytest.mark.parametrize("stop", ["<|start|>user", "\n<|end|>", "<|end|><|start|>"])
def test_a_stop_string_that_no_answer_can_have_is_refused(served: Served, make: Make, stop: str) -> None:
    with pytest.raises(UsageError, match=r"stop string .* has more than the special token <\|(start|end)\|>.* alone"):
        make().submit(Submission("a", ALL, question(1), Sampling(5), ("never seen", stop)))


def test_log_probabilities_are_those_of_the_logits(served: Served, make: Make) -> None:
    """Whatever the temperature."""
    index, scheduler = served.indices["a"], make()
    for sampling in (Sampling(6), Sampling(6, temperature=3.0, top_k=50, seed=1)):
        with_both = [
            scheduler.submit(Submission("a", ALL, question(1), sampling, logprobs=top)) for top in (3, None, 0, 1000)
        ]
        pieces = [list(stream) for stream in with_both]
        tokens = ids(pieces[0])
        assert all(ids(one) == tokens for one in pieces)
        found, none, own, every = ([one for piece in each for one in piece.logprobs] for each in pieces)
        logits = plain_logits_after(index, torch.cat([question(1), torch.tensor(tokens)]))
        expected = logits[len(question(1)) - 1 : -1].float().log_softmax(-1)
        assert [one.token for one in found] == tokens
        assert not none
        for place, one in enumerate(found):
            assert one.logprob == pytest.approx(float(expected[place, one.token]), abs=1e-3)
            best = expected[place].topk(3)
            assert [token for token, _ in one.top] == best.indices.tolist()
            assert [logprob for _, logprob in one.top] == pytest.approx(best.values.tolist(), abs=1e-3)
            assert not own[place].top
            assert len(every[place].top) == expected.shape[1]


def test_many_threads_read_their_answers(served: Served, make: Make) -> None:
    scheduler, found = make(slots=3), dict[int, list[Piece]]()

    def read(first: int) -> None:
        for number in range(first, first + 4):
            found[number] = list(served.ask(scheduler, "a", question(number)))

    threads = [threading.Thread(target=read, args=(4 * one,)) for one in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        check(found[number], served.alone("a", question(number)))


def test_many_tasks_read_their_answers_and_some_go(served: Served, make: Make) -> None:
    scheduler = make(slots=2)

    async def read(number: int, longest: int = 8) -> list[Piece]:
        return [piece async for piece in served.ask(scheduler, "a", question(number), longest)]

    async def all_of_them() -> list[list[Piece]]:
        going = asyncio.create_task(read(4, 4000))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(going, 0.2)
        async for _ in served.ask(scheduler, "a", question(4), 4000):
            break
        return await asyncio.gather(*(read(number) for number in range(6)))

    for number, pieces in enumerate(asyncio.run(all_of_them())):
        check(pieces, served.alone("a", question(number)))
    assert scheduler.measures().running == 0


def test_a_loop_that_has_ended_does_not_hold_up_the_scheduler() -> None:
    channel = Channel()

    async def wait() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(channel.get_async(), 0.01)

    asyncio.run(wait())
    channel.put(Piece("a"))
    assert channel.get() == Piece("a")


def test_a_read_that_is_cancelled_ends_the_answer_and_loses_no_piece() -> None:
    channel = Channel()
    stream, left = Stream(channel), [Piece("a"), Piece("b", finish="cancelled")]

    async def read() -> list[Piece]:
        pieces = aiter(stream)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(pieces), 0.01)
        assert channel.cancelled
        for piece in left:
            channel.put(piece)
        return [piece async for piece in pieces]

    assert asyncio.run(read()) == left


def test_a_loop_that_is_left_ends_the_answer() -> None:
    async def leave(stream: Stream) -> None:
        async for _ in stream:
            break

    for with_tasks in (False, True):
        channel = Channel()
        stream = Stream(channel)
        channel.put(Piece("a"))
        if with_tasks:
            asyncio.run(leave(stream))
        else:
            for _ in stream:
                break
        assert channel.cancelled


def test_all_readers_of_a_stream_end_with_it() -> None:
    channel = Channel()
    stream, pieces = Stream(channel), [Piece("a"), Piece("b", finish="stop")]

    async def read() -> list[Piece]:
        return [piece async for piece in stream]

    async def read_by_all() -> list[list[Piece]]:
        reading = [
            *(asyncio.create_task(read()) for _ in range(2)),
            asyncio.create_task(asyncio.to_thread(list, stream)),
        ]
        await asyncio.sleep(0.01)
        for piece in pieces:
            channel.put(piece)
        return await asyncio.gather(*reading)

    read_in_turn = [piece for part in asyncio.run(read_by_all()) for piece in part]
    assert sorted(read_in_turn, key=lambda piece: piece.text) == pieces
    assert list(stream) == []


def test_a_stream_that_is_dropped_is_cancelled() -> None:
    channel = Channel()
    Stream(channel)
    assert channel.cancelled


def test_a_session_streams_while_it_answers(served: Served) -> None:
    index = served.indices["a"]
    session = StreamingSession.open(index, ALL)
    streams = [session.stream(question(number), Sampling(8)) for number in range(4)]
    assert session.ask(question(4), Sampling(8)).ids == served.alone("a", question(4)).ids
    for number, stream in enumerate(streams):
        pieces = list(stream)
        check(pieces, served.alone("a", question(number)))
        usage = pieces[-1].usage
        assert usage is not None
        assert 0 <= usage.kv_fraction < 1.2
    asked = "What is an expression?"
    assert text(session.stream(asked, Sampling(12))) == session.ask(asked, Sampling(12)).text
    assert text(session.stream(asked, Sampling(12), stop="\n")) in session.ask(asked, Sampling(12)).text
    with pytest.raises(UsageError):
        session.stream("")


def test_any_number_is_taken_and_ends_nobody_elses_answer(served: Served) -> None:
    session = StreamingSession.open(served.indices["a"], ALL)
    whole, drawn = served.alone("a", question(0)), Sampling(8, temperature=2.0, top_p=0.5, top_k=5, seed=3)
    alike = Sampling(np.int64(8), np.float32(2), np.float32(0.5), np.int64(5), np.int64(3))  # type: ignore[arg-type]
    other = session.stream(question(0), Sampling(8))
    streams = [
        session.stream(question(0), Sampling(8), timeout=1e300),
        session.stream(question(0), Sampling(8), timeout=inf),
        session.stream(question(1), drawn),
        session.stream(question(1), alike),
        session.stream(question(1), Sampling(8, temperature=2, top_p=Fraction(1, 2), top_k=5, seed=3)),  # type: ignore[arg-type]
    ]
    for stream in (other, *streams[:2]):
        check(list(stream), whole)
    assert len({tuple(ids(stream)) for stream in streams[2:]}) == 1


def test_a_number_beyond_every_float_ends_nobody_elses_answer(served: Served, make: Make) -> None:
    session = StreamingSession.open(served.indices["a"], ALL)
    other = session.stream(question(0), Sampling(8))
    with pytest.raises(UsageError, match="timeout is larger than every float"):
        session.stream(question(0), timeout=10**400)
    with pytest.raises(UsageError, match="temperature is larger than every float"):
        session.stream(question(0), Sampling(temperature=10**400))
    check(list(other), served.alone("a", question(0)))
    check(list(served.ask(make(), "a", question(0), timeout=10**400)), served.alone("a", question(0)))


def test_a_callback_may_not_stream(served: Served) -> None:
    """Neither ask for a stream nor read one of before: its answer would wait for the answer that calls back."""
    session, other = (StreamingSession.open(served.indices["a"], ALL) for _ in range(2))
    before, refused = session.stream(question(0), Sampling(4000)), list[object]()

    async def read() -> None:
        await anext(aiter(before))

    def stop() -> bool:
        for deed in (
            lambda: session.stream(question(0)),
            lambda: other.stream(question(0)),
            lambda: next(iter(before)),
            lambda: asyncio.run(read()),
        ):
            with pytest.raises(UsageError, match=r"asked a question, read a stream .* in the middle of an answer"):
                deed()
            refused.append(deed)
        return False

    assert session.ask(question(1), Sampling(2), stop=stop).ids == served.alone("a", question(1)).ids[:2]
    assert len(refused) == 8


def test_a_session_whose_config_lets_no_questions_share_steps_streams_them_in_turn(served: Served) -> None:
    session = StreamingSession.open(served.indices["a"], replace(ALL, gauge=True))
    streams = [session.stream(question(number), Sampling(8)) for number in range(2)]
    assert session.ask(question(4), Sampling(8)).ids == served.alone("a", question(4)).ids
    for number, stream in enumerate(streams):
        check(list(stream), served.alone("a", question(number)))


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        (["system", "user"], "system"),
        (["assistant"], "the assistant's; the first must be the user's"),
        (["user", "user"], "the user's; the next must be the assistant's"),
        (["user", "assistant"], "last message"),
        ([], "last message"),
        (["user", "tool", "user"], "the tool's; the next must be"),
    ],
)
def test_messages_that_are_no_conversation_are_refused(served: Served, roles: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        conversation_tokens(served.indices["a"], [Message(role, "x") for role in roles])
    with pytest.raises(UsageError, match="empty"):
        conversation_tokens(served.indices["a"], [Message("user", " ")])
