"""The commands of `sparsekv chat`, on a terminal: what each does, and what is said where it cannot."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chats import ANSWER, FRAME, PROMPT, answer, chat, cut, prompt_tokens, tokens
from support.command import run_here
from support.dialogue import Dialogue, dialogue
from support.doc_pages import ROOT
from support.trace_page import read_trace_page

from sparsekv.cli.answering.options import Choices
from sparsekv.cli.answering.session import attention_options
from sparsekv.cli.common.streams import printable
from sparsekv.formats.index.reader import Artifact
from sparsekv.runtime.decoding.choose_config import choose_config
from sparsekv.runtime.selection.registry import form_options

COMMANDS = ("/help", "/save", "/method", "/budget", "/stats", "/forget", "/quit", "/trace")


def test_each_question_sees_the_talk_before_it(place: Path) -> None:
    with chat(place, "--stats") as one:
        first = prompt_tokens(answer(one, "Why?"))
        assert prompt_tokens(answer(one, "And then?")) == first + ANSWER + tokens(FRAME, "And then?")
        assert "forgot 2 questions" in answer(one, "/forget")
        assert prompt_tokens(answer(one, "Why?")) == first
        one.press("d")


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
            "error: no command /usr/bin: /help lists them (to ask a question that begins with /, type a second / "
            "before it)",
        ),
        ("/budget lots", "error: /budget lots is not a budget: give a share of the document such as 0.05"),
        ("/method nope", "error: no method 'nope'; there are: "),
        ("/method codes", "error: the index was not built with 'codes'; "),
        ("/stats perhaps", "error: /stats perhaps: write /stats, /stats on or /stats off"),
        ("/forget 1", "error: /forget 1: /forget takes no argument; type it alone"),
        ("/quit now", "error: /quit now: /quit takes no argument; type it alone"),
        ("/save", "error: /save: give the new index a name"),
        ("/save talk.skv", "error: /save: nothing was asked yet"),
        ("/trace", "error: /trace: give the page a name"),
        ("/trace out.html", "error: /trace: nothing was asked yet"),
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
        assert "error: /save doc.skv: that name exists already; give another" in answer(one, "/save doc.skv")
        assert "error: /save none/talk.skv: the folder to write it in does not exist" in answer(
            one, "/save none/talk.skv"
        )
        for entry in ("/save ~no-such-user/talk.skv", "/trace ~no-such-user/out.html"):
            assert f"error: {entry}: the folder to write it in does not exist" in answer(one, entry)
        assert prompt_tokens(answer(one, "Why?")) == first + ANSWER + tokens(FRAME, "Why?")
        one.press("d")


def test_a_setting_changes_and_the_talk_stays(place: Path) -> None:
    with chat(place, "--stats", "--residual") as one:
        first = prompt_tokens(answer(one, "Why?"))
        assert answer(one, "/method").startswith("multipole at 10% of the document; there are: keydiff, ")
        assert answer(one, "/method quest") == (
            "quest at 10% of the document, with --residual, its own budget; /budget B changes that\n"
        )
        assert "--budget 3 is 3 tokens of the document" in answer(one, "/budget 3")
        assert answer(one, "/method squeezed") == (
            "squeezed at 3 tokens of the document, with --residual; /budget B changes that\n"
        )
        assert answer(one, "/budget 100%") == "squeezed at 100% of the document, with --residual\n"
        assert answer(one, "/budget") == "squeezed at 100% of the document, with --residual\n"
        assert answer(one, "/method window") == "window with the same tokens for any budget, with --residual\n"
        assert prompt_tokens(answer(one, "Why?")) == first + ANSWER + tokens(FRAME, "Why?")
        assert "/budget 9% has no effect on window" in answer(one, "/budget 9%")
        one.press("d")


def test_options_of_the_file_count_for_a_later_method(place: Path) -> None:
    """The file's options are also in the command that goes on with a saved talk."""
    (place / "sparsekv.toml").write_text('[chat]\nmethod = "quest"\ndims = 4\nraw = true\n')
    with chat(place) as one:
        answer(one, "/method loki")
        answer(one, "/budget 25%")
        answer(one, "Why?")
        told = "`sparsekv chat --index later.skv --raw --method loki --budget 25% --dims 4` goes on with it"
        assert told in answer(one, "/save later.skv")
        one.press("d")
    (place / "sparsekv.toml").write_text('[chat]\nbudget = "30%"\nresidual = true\n')
    with chat(place, "--method", "dense", "-i", "doc.skv") as one:
        assert answer(one, "/method quest") == (
            "quest at 30% of the document, with --residual; /budget B changes that\n"
        )
        one.press("d")


def test_an_option_of_the_file_that_a_later_method_does_not_read_is_ignored(built: Path) -> None:
    artifact = Artifact(built / "doc.skv")
    later = {"opened": 0.5, "selection": "threshold"}
    choices = Choices(artifact, None, {"opened": None, "selection": None}, residual=False, later=later)
    after = choices.other_method(choose_config(artifact, "quest"), "squeezed")
    assert form_options(after.attention) == ["--selection", "threshold"]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, ""),
        ({"method": "dense"}, "--method dense"),
        ({"budget": "10%"}, ""),
        (
            {"method": "squeezed", "budget": "40", "parameters": {"selection": "threshold"}},
            "--method squeezed --budget 40 --selection threshold",
        ),
        ({"method": "quest", "residual": True, "prefill": "own"}, "--method quest --residual --prefill own"),
        (
            {"prefill": "quoka", "prefill_budget": "9%", "placement": "host"},
            "--prefill quoka --prefill-budget 9% --placement host",
        ),
    ],
    ids=str,
)
def test_the_options_of_a_config_choose_it(built: Path, config: dict[str, Any], options: str) -> None:
    artifact = Artifact(built / "doc.skv")
    assert attention_options(artifact, choose_config(artifact, **config)) == options.split()


def test_another_method_leaves_the_options_of_prefill_to_prefill(built: Path) -> None:
    """Decode steps of quoka do not read this option, but the questions' tokens do."""
    artifact, parameters = Artifact(built / "doc.skv"), {"quoka_subset": "all"}
    before = choose_config(artifact, "quest", parameters, prefill="quoka")
    after = Choices(artifact, None, parameters, residual=False).other_method(before, "quoka")
    assert (after.attention.name, after.question) == ("quoka", before.question)


def test_stats_are_turned_on_and_off(place: Path) -> None:
    with chat(place) as one:
        assert "prompt tokens" not in answer(one, "Why?")
        assert answer(one, "/stats") == "stats are on\n"
        assert re.search(r"first token after .* s, .* read .*% of the document's keys and values", answer(one, "Why?"))
        assert answer(one, "/stats off") == "stats are off\n"
        assert "prompt tokens" not in answer(one, "Why?")
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
    assert printable(run_here(*ask, *options).stdout) + cut() == third


def test_a_trace_is_of_the_last_question_after_the_talk_before_it(place: Path) -> None:
    with chat(place, "--budget", "100%") as one:
        answer(one, "Why?")
        said = answer(one, "And then?")
        assert "error: /trace out.txt: a trace is written to a file that ends in .html or .json" in answer(
            one, "/trace out.txt"
        )
        told = answer(one, "/trace out.html")
        one.press("d")
    traced = read_trace_page(place / "out.html")
    assert told.startswith("out.html: ")
    assert "otherwise" not in told
    shown = printable(traced["answer"]) + "\n" + cut()
    assert (traced["question"], shown, traced["truth"]) == ("And then?", said, True)
    assert "options" not in traced  # No command has the turns before this question.


def test_the_page_has_every_command() -> None:
    page = (ROOT / "docs" / "how-to" / "chat.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(/\w+)", page, re.MULTILINE) == list(COMMANDS)
