"""Ctrl-C: an answer that has begun ends after its next token; all else, and a second one, ends at once."""

import signal
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from support.small_index import build_small

from sparsekv.cli.answering.options import Choices
from sparsekv.cli.chatting.loop import _answer
from sparsekv.cli.chatting.session import Chat, Interrupts
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.session import Conversation


def _press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_answer_that_has_begun_goes_on_to_its_next_token() -> None:
    interrupts = Interrupts()
    with interrupts.handled(), interrupts.answering() as stop:
        assert not stop()
        _press()
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            _press()


def test_before_an_answer_begins_nothing_is_waited_for() -> None:
    interrupts = Interrupts()
    with interrupts.handled(), interrupts.answering() as stop:
        with pytest.raises(KeyboardInterrupt):
            _press()
        assert stop(), "a library may have lost it"


def test_outside_an_answer_it_interrupts_and_is_forgotten_at_the_next_entry() -> None:
    interrupts = Interrupts()
    with interrupts.handled():
        with interrupts.answering() as stop:
            stop()
        with pytest.raises(KeyboardInterrupt):
            _press()
        assert interrupts.came
        interrupts.reset()
        assert not interrupts.came


def test_whoever_handled_it_before_does_so_after() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts().handled():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_where_it_is_ignored_it_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts().handled():
            _press()
    finally:
        signal.signal(signal.SIGINT, before)


class PressingKeys(StringIO):
    """A terminal at which Ctrl-C is pressed when an answer's line ends."""

    def write(self, text: str) -> int:
        if text.endswith("\n"):
            _press()
        return super().write(text)


def test_an_interruption_behind_an_answer_says_that_the_answer_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = build_small(tmp_path / "small.skv")
    config = DecodeConfig(Dense())
    talk, choices = Conversation(index, config), Choices(index.artifact, None, {}, residual=False)
    session = Chat(talk, choices, Sampling(2), stats=False, quiet=True, dtype="auto")
    with session.interrupts.handled(), redirect_stdout(PressingKeys()):
        _answer(session, "Why?")
    assert len(talk.turns) == 1
    assert session.asked == "Why?"
    assert capsys.readouterr().err == "interrupted; what was entered has taken effect\n"
