"""`sparsekv chat` on a terminal: questions, commands, keys and pasted text, as a person has them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command import run_here
from support.dialogue import Dialogue, dialogue

from sparsekv.cli.common.printable import printable

PROMPT = r"\x1b\[\?2004h> "
"""Where the command waits, with the mark for pasted text that readline turns on."""
ENTERED = "\x1b[?2004l"
"""What follows an entry."""
ANSWER = 8
FIRST_FRAME, FRAME = ("\n\n<|end|>\n<|start|>assistant\n", "<|end|>\n<|start|>user\n<|end|>\n<|start|>assistant\n")
COMMANDS = ("/help", "/save", "/method", "/budget", "/stats", "/forget", "/quit")


@contextmanager
def chat(place: Path, *options: str) -> Iterator[Dialogue]:
    """A chat over the tiny index that waits for its first question."""
    short = () if "--max-new-tokens" in options else ("--max-new-tokens", str(ANSWER))
    with dialogue("chat", "--model", "model", *short, *options, cwd=place) as one:
        one.until(PROMPT)
        yield one


def answer(one: Dialogue, entry: str) -> str:
    """What is shown after an entry, up to the next prompt."""
    one.send(f"{entry}\r")
    return shown(one)


def shown(one: Dialogue) -> str:
    """What is shown up to the next prompt, without the line that was typed."""
    return one.until(PROMPT).rpartition(ENTERED)[2].lstrip("\r")


def tokens(frame: str, text: str = "") -> int:
    """How many tokens of the tiny tokenizer a text has: one a byte, and one for each special one."""
    return len(re.sub(r"<\|\w+\|>", "x", frame + text).encode())


def prompt_tokens(said: str) -> int:
    """What --stats says of the prompt's length."""
    found = re.search(r"([\d,]+) prompt tokens", said)
    assert found is not None, said
    return int(found[1].replace(",", ""))


def test_each_question_sees_the_talk_before_it(place: Path) -> None:
    with chat(place, "--stats") as one:
        first = prompt_tokens(answer(one, "Why?"))
        assert prompt_tokens(answer(one, "And then?")) == first + ANSWER + tokens(FRAME, "And then?")
        assert "forgot 2 questions" in answer(one, "/forget")
        assert prompt_tokens(answer(one, "Why?")) == first
        one.press("d")


def test_an_answer_is_what_generate_gives_with_what_steers_made_visible(place: Path) -> None:
    options = ("--max-new-tokens", "60", "--budget", "100%")
    generated = run_here("generate", "Why?", "--model", "model", *options).stdout
    assert printable(generated) != generated
    with chat(place, *options) as one:
        assert answer(one, "Why?") == printable(generated)
        one.send("/quit\r")


def test_help_lists_every_command_and_key(place: Path) -> None:
    with chat(place) as one:
        told = answer(one, "/help")
        assert re.findall(r"^/\w+", told, re.MULTILINE) == list(COMMANDS)
        assert all(key in told for key in ("//", "!multi", "!end", "Ctrl-C", "Ctrl-D"))
        one.send("/quit\r")


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("/budgt 5%", "error: no command /budgt: did you mean /budget?"),
        ("/exit", "error: no command /exit: did you mean /quit?"),
        (
            "/usr/bin is what?",
            "error: no command /usr/bin: /help lists them (a question that begins with / is written //)",
        ),
        ("/budget lots", "error: /budget lots: give a share of the document such as 0.05"),
        ("/method nope", "error: no method 'nope'; there are: "),
        ("/method codes", "error: the index was not built with 'codes'; "),
        ("/stats perhaps", "error: /stats perhaps: write /stats, /stats on or /stats off"),
        ("/save", "error: /save: give the new index a name"),
        ("/save talk.skv", "error: /save: nothing was asked yet"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_one_line(wrong: Dialogue, entry: str, told: str) -> None:
    said = answer(wrong, entry)
    assert said.startswith(told)
    assert said.count("\n") == 1


@pytest.fixture(scope="module")
def wrong(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dialogue]:
    """One chat for all mistakes, which outlives each of them."""
    with dialogue("chat", "-i", built / "doc.skv", "--model", built / "model", cwd=tmp_path_factory.mktemp("w")) as one:
        one.until(PROMPT)
        yield one
        one.send("/quit\r")


def test_a_save_that_would_overwrite_is_refused_and_the_talk_goes_on(place: Path) -> None:
    with chat(place, "--stats") as one:
        first = prompt_tokens(answer(one, "Why?"))
        assert "error: /save doc.skv exists already; give another name" in answer(one, "/save doc.skv")
        assert "error: /save none/talk.skv: its folder does not exist" in answer(one, "/save none/talk.skv")
        assert prompt_tokens(answer(one, "Why?")) == first + ANSWER + tokens(FRAME, "Why?")
        one.press("d")


def test_a_setting_changes_and_the_talk_stays(place: Path) -> None:
    with chat(place, "--stats", "--residual") as one:
        first = prompt_tokens(answer(one, "Why?"))
        assert answer(one, "/method").startswith(
            "multipole at 10% of the document, with --residual; there are: keydiff, "
        )
        assert answer(one, "/method quest") == "quest at 10% of the document, with --residual\n"
        assert "--budget 3 is 3 tokens of the document" in answer(one, "/budget 3")
        assert answer(one, "/method squeezed") == "squeezed at 3 of the document, with --residual\n"
        assert answer(one, "/budget 100%") == "squeezed at 100% of the document, with --residual\n"
        assert answer(one, "/budget") == "squeezed at 100% of the document, with --residual\n"
        assert prompt_tokens(answer(one, "Why?")) == first + ANSWER + tokens(FRAME, "Why?")
        one.press("d")


def test_stats_are_turned_on_and_off(place: Path) -> None:
    with chat(place) as one:
        assert "prompt tokens" not in answer(one, "Why?")
        assert answer(one, "/stats") == "stats are on\n"
        assert re.search(r"first token after .* s, .* read .*% of the document's keys and values", answer(one, "Why?"))
        assert answer(one, "/stats off") == "stats are off\n"
        assert "prompt tokens" not in answer(one, "Why?")
        one.press("d")


def test_ctrl_c_stops_an_answer_whose_beginning_stays(place: Path) -> None:
    with chat(place, "--stats", "--max-new-tokens", "2000") as one:
        one.send("Why?\r")
        one.until(r"\n.*\n.*\n")
        one.press("c")
        said = shown(one)
        assert "stopped; what came of the answer stays in the talk" in said
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
        one.press("c")
        assert "Ctrl-D or /quit leaves" in shown(one)
        one.send("half a quest")
        one.until("half a quest")
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
        first = prompt_tokens(answer(one, "//help"))
        answer(one, "/forget")
        assert prompt_tokens(answer(one, "help")) == first - 1
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


def test_a_saved_talk_goes_on_as_the_chat_does(place: Path) -> None:
    options = ("--budget", "100%")
    with chat(place, *options) as one:
        for question in ("Why?", "And then?"):
            answer(one, question)
        assert "saved talk.skv" in answer(one, "/save talk.skv")
        third = answer(one, "What next?")
        one.press("d")
    assert run_here("inspect", "-i", "talk.skv", "--verify", "-q").code == 0
    ask = ("generate", "What next?", "-i", "talk.skv", "--model", "model", "--max-new-tokens", str(ANSWER))
    assert printable(run_here(*ask, *options).stdout) == third
