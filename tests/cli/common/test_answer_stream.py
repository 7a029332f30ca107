"""Answers on a terminal are broken between words; elsewhere they stay as they are."""

import io
import textwrap

import pytest
from rich.cells import cell_len

from sparsekv.cli.common import questions
from sparsekv.cli.common.questions import AnswerStream

TEXT = "It was said that an index holds what attention reads, and some words are unquestionablylong.\n  Then\n\nmore."


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _printed(monkeypatch: pytest.MonkeyPatch, out: io.StringIO, columns: int, pieces: list[str]) -> str:
    monkeypatch.setattr(questions.sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = AnswerStream()
    for piece in pieces:
        stream.add(piece)
    stream.end()
    return out.getvalue()


@pytest.mark.parametrize("columns", [20, 33, 80])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_no_word_is_cut_that_a_line_has_room_for(monkeypatch: pytest.MonkeyPatch, columns: int, size: int) -> None:
    """As textwrap breaks each line, whatever the pieces are in which it comes."""
    shown = _printed(monkeypatch, _Terminal(), columns, [TEXT[at : at + size] for at in range(0, len(TEXT), size)])
    lines = [textwrap.wrap(line, columns, break_long_words=False) or [""] for line in TEXT.split("\n")]
    assert shown.splitlines() == [part for line in lines for part in line]


def test_wide_characters_are_broken_anywhere_and_shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\u6f22\u5b57" * 9
    shown = _printed(monkeypatch, _Terminal(), 10, [*text])
    assert shown.replace("\n", "") == text
    assert {cell_len(line) for line in shown.splitlines()[:-1]} == {10}


def test_a_pipe_gets_the_text_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _printed(monkeypatch, io.StringIO(), 20, [TEXT[:30], TEXT[30:]]) == f"{TEXT}\n"
