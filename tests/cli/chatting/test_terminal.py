"""`sparsekv chat` on a terminal: questions, keys, pasted text and the window, as a person has them."""

import re
from pathlib import Path

import pytest
from support.chats import ANSWER, FRAME, answer, chat, cut, prompt_tokens, shown, tokens
from support.command import run_here
from support.dialogue import dialogue

from sparsekv.cli.common.streams import printable


def test_an_answer_is_what_generate_gives_with_what_steers_made_visible(place: Path) -> None:
    options = ("--max-new-tokens", "60", "--budget", "100%")
    generated = run_here("generate", "Why?", "--model", "model", *options).stdout
    assert printable(generated) != generated
    with chat(place, *options) as one:
        assert answer(one, "Why?") == printable(generated) + cut(60)
        one.send("/quit\r")


def test_ctrl_c_stops_an_answer_whose_beginning_stays(place: Path) -> None:
    with chat(place, "--stats", "--max-new-tokens", "2000") as one:
        one.send("Why?\r")
        one.until(r"\n.*\n.*\n")
        one.press("c")
        said = shown(one)
        assert "stopped; the part of the answer so far stays in the talk" in said
        came = re.search(r"(\d+) tokens at", said)
        assert came is not None
        assert 1 <= int(came[1]) < 2000
        one.send("And?\r")
        one.until(r"\n.*\n.*\n")
        one.press("c")
        expected = prompt_tokens(said) + int(came[1]) + tokens(FRAME, "And?")
        assert prompt_tokens(shown(one)) == expected
        one.press("d")


def test_ctrl_c_at_a_prompt_drops_what_is_typed_and_at_an_empty_one_says_how_to_leave(place: Path) -> None:
    with chat(place) as one:
        one.until_it_waits()
        one.press("c")
        assert "Ctrl-D or /quit leaves" in shown(one)
        one.send("half a quest")
        one.until("half a quest")
        one.until_it_waits()
        one.press("c")
        assert shown(one).strip() == ""
        one.press("d")


@pytest.mark.parametrize("word", ["exit", "quit"])
def test_the_words_that_leave_other_chats_leave(place: Path, word: str) -> None:
    with chat(place) as one:
        one.send(f"{word}\r")


LINES = "one\n/save nothing.skv\n\nthree // four"


def test_several_lines_are_one_question(place: Path) -> None:
    """Pasted, or in a block; what looks like a command in them is text."""
    with chat(place, "--stats") as one:
        empty = prompt_tokens(answer(one, "?")) - 1
        answer(one, "/forget")
        one.paste(f"{LINES}\n")
        assert prompt_tokens(answer(one, "")) == empty + tokens(LINES)
        answer(one, "/forget")
        for line in ("!multi", *LINES.split("\n")):
            one.send(f"{line}\r")
            one.until(r"\.\.\. ")
        assert prompt_tokens(answer(one, "!end")) == empty + tokens(LINES)
        answer(one, "/forget")
        for line in ("!multi x", "!end"):
            one.send(f"{line}\r")
            one.until(r"\.\.\. ")
        assert prompt_tokens(answer(one, "!end x")) == empty + tokens("!end")
        assert not (place / "nothing.skv").exists()
        one.press("d")


def test_two_slashes_ask_what_begins_with_one(place: Path) -> None:
    with chat(place, "--stats") as one:
        first = prompt_tokens(answer(one, "//quote"))
        answer(one, "/forget")
        assert prompt_tokens(answer(one, "quote")) == first - 1
        one.press("d")


def test_a_line_outlives_the_windows_size(place: Path) -> None:
    question = "What is " + "7 times " * 20 + "7?"
    with chat(place, "--stats") as one:
        empty = prompt_tokens(answer(one, "?")) - 1
        answer(one, "/forget")
        one.resize(10, 40)
        one.send(question[:60])
        one.until("times")
        one.resize(30, 20)
        one.send(question[60:])
        one.resize(24, 100)
        assert prompt_tokens(answer(one, "")) == empty + tokens(question)
        one.press("d")


def test_earlier_entries_come_back_in_the_next_chat(place: Path) -> None:
    with chat(place) as one:
        one.paste("first\nsecond")
        answer(one, "")
        one.press("d")
    assert (place / "cache" / "chat-history.jsonl").stat().st_mode & 0o077 == 0
    with chat(place, "--stats") as one:
        one.send("\x1b[A")
        one.until("second")
        asked = prompt_tokens(answer(one, ""))
        answer(one, "/forget")
        assert asked == prompt_tokens(answer(one, "?")) - 1 + tokens("first\nsecond")
        one.press("d")


def test_a_cache_that_cannot_be_written_is_done_without(place: Path) -> None:
    (place / "cache").write_text("a file, where a folder should be")
    with chat(place) as one:
        answer(one, "Why?")
        assert "/stats" in answer(one, "/he\t")
        one.press("d")


def test_where_stdout_goes_elsewhere_it_gets_the_answers_alone(place: Path) -> None:
    ask = ("--model", "model", "--max-new-tokens", str(ANSWER))
    with dialogue("chat", *ask, cwd=place, stdout=place / "answers") as one:
        for entry in ("Why?", "/help"):
            one.until("> ")
            one.send(f"{entry}\r")
        one.until("/quit .*> ")
        one.press("d")
    assert (place / "answers").read_bytes().decode() == run_here("generate", "Why?", *ask).stdout
