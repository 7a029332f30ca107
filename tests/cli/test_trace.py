"""`sparsekv trace`: an answer on stdout, or its trace, which a schema describes; and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.command import Outcome, fails, run_here, with_options
from support.forked import zygote
from support.html_page import WrittenPage
from support.terminal import here_on_terminal
from support.trace_document import synthetic_trace
from support.trace_page import read_trace_page

from sparsekv.cli.common import console
from sparsekv.cli.common.streams import printable

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "schemas" / "trace.json").read_text("utf-8"))
QUESTION = ("trace", "What is 7 times 7?", "--index", "doc.skv", "--model", "model", "--max-new-tokens", "3")
PASSAGE = "Line 7 says that 7 times 7 is 49."


def _is_valid(document: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    Draft202012Validator(SCHEMA).validate(document)


def _traced(*options: str) -> dict[str, Any]:
    outcome = run_here(*QUESTION, "--json", *options)
    assert outcome.code == 0, outcome.stderr
    document: dict[str, Any] = json.loads(outcome.stdout)
    _is_valid(document)
    return document


def _text(outcome: Outcome) -> str:
    assert outcome.code == 0, outcome.stderr
    return outcome.stdout


def test_the_answer_is_on_stdout_as_generate_gives_it(place: Path) -> None:
    plain = _text(run_here("generate", *QUESTION[1:]))
    outcome = run_here(*QUESTION, "-o", "trace.json")
    assert _text(outcome) == plain
    document = json.loads((place / "trace.json").read_text("utf-8"))
    _is_valid(document)
    assert document["answer"] + "\n" == plain
    size = (place / "trace.json").stat().st_size
    records = 3 * len(document["layers"]) * document["kv_heads"]
    assert f"{records} records of 3 tokens, 3 layers and 2 KV heads, {size:,} bytes" in outcome.stderr
    assert len(document["records"]) == records


def test_progress_on_a_terminal_does_not_run_into_the_answer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "EVERY", 0.001)
    asked = with_options(QUESTION, "--max-new-tokens", "40", "--without", PASSAGE)
    answer = printable(_text(run_here("generate", *with_options(QUESTION, "--max-new-tokens", "40")[1:], "-q")))
    code, shown = here_on_terminal(*asked)
    assert code == 0
    before, found, after = shown.partition(answer)
    assert found, shown
    assert before.endswith("\n")
    assert all("loading" in line for line in before.splitlines())
    assert "answering without the passage, " in after


@pytest.mark.parametrize("method", ["multipole", "dense"])
def test_a_trace_and_its_page_have_the_sources_that_generate_names(place: Path, method: str) -> None:
    options = "--method", method, "-q"
    outcome = run_here(*QUESTION, *options, "-o", "trace.html")
    assert outcome.code == 0, outcome.stderr
    named = json.loads(_text(run_here("generate", *QUESTION[1:], *options, "--sources", "8", "--json")))["sources"]
    packed = WrittenPage(place / "trace.html").data()["facts"]["sources"]
    assert len(named) == 8
    for ours, theirs in zip(packed, named, strict=True):
        assert ours == theirs | {"score": pytest.approx(theirs["score"], rel=1e-3)}
    document = read_trace_page(place / "trace.html")
    texts = [token for passage in document["passages"] for token in passage["tokens"]]
    for one in packed:
        assert "".join(texts[slice(*one["tokens"])]).strip() == one["text"]


@pytest.mark.parametrize("options", [(), ("--truth",), ("--method", "squeezed", "--residual"), ("--prefill", "own")])
def test_json_is_what_the_schema_says(place: Path, options: tuple[str, ...]) -> None:
    document = _traced(*options)
    assert document["truth"] == ("--truth" in options)
    assert (document["measures"]["recall"] is not None) == document["truth"]
    assert document["question"] == QUESTION[1]
    assert "without" not in document
    shown = "".join("".join(one["tokens"]) for one in document["passages"])
    assert shown.count("Line ") == (place / "doc.txt").read_text().count("Line ")


def test_a_trace_names_the_options_that_its_answer_was_given_with(place: Path) -> None:
    """With them, the page's command asks without a passage as the traced answer was given."""
    given = ("--method", "squeezed", "--budget", "20%", "--residual", "--raw", "--lookup", "flat")
    document = _traced(*given, "--truth", "--without", PASSAGE, "-q")
    options = document["options"]
    pairs = [("--model", "model"), ("--max-new-tokens", "3"), ("--method", "squeezed"), ("--budget", "20%")]
    assert sorted(options) == sorted([*(word for pair in pairs for word in pair), "--residual", "--raw", *given[-2:]])
    again = run_here("trace", "--index", document["index"], document["question"], *options, "--json")
    found = json.loads(_text(again))
    assert [found[name] for name in ("answer", "method", "budget", "residual", "options")] == [
        document[name] for name in ("answer", "method", "budget", "residual", "options")
    ]


def test_by_default_everything_is_chosen_for_the_first_token(place: Path) -> None:
    first = [one for one in _traced("--truth")["records"] if one["token"] == 0]
    assert all((one["stood_for"], one["missed"]) == (0, 0) for one in first)
    assert all(one["exact"] + one["chosen"] == pytest.approx(1) for one in first)


def test_without_a_passage_there_are_two_answers(place: Path) -> None:
    document = _traced("--truth", "--without", PASSAGE, "--without", "Line 8 says")
    assert document["without"]["passages"] == [PASSAGE, "Line 8 says"]
    for name in ("log_probability", "dense_log_probability"):
        shown, hidden = document["without"][name]
        assert shown != hidden
    outcome = run_here(*QUESTION, "--without", PASSAGE)
    assert "without: " in outcome.stderr
    assert re.search(
        r"the first answer is [\d.,e+]+ times (less|more) likely then: its log-probability is -[\d.]+ instead of -",
        outcome.stderr,
    )


def test_a_made_up_trace_is_valid_and_adds_up() -> None:
    """The synthetic trace that the tests of pages draw has the format of the command's trace."""
    document = synthetic_trace(2000, 3, 2, 2, seed=1)
    _is_valid(document)
    assert sum(len(one["tokens"]) for one in document["passages"]) == document["n_context"]
    for one in document["records"]:
        assert one["exact"] + one["chosen"] + one["stood_for"] + one["missed"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-o", "trace.txt"), ("--output trace.txt", "ends in .html or .json")),
        (("-o", "trace"), ("--output trace", "ends in .html or .json")),
        (
            ("-o", "none/trace.json"),
            ("--output none/trace.json: the folder to write it in does not exist", "create that folder first"),
        ),
        (("-o", f"{'n' * 255}.json"), ("the name is too long", "shorter")),
        (("-o", "folder.json"), ("--output folder.json is a folder", "name of a file")),
        (("--without", "No such line."), ("--without 'No such line.'", "no such passage", "copy it from the document")),
        (("--without", " "), ("--without is empty", "give a passage")),
        (("--stream",), ("--stream", "leave it out")),
        (("--max-new-tokens", "0"), ("--max-new-tokens 0",)),
        (("--budget", "0"), ("--budget 0",)),
        (("--prefill-budget", "9"), ("--prefill-budget 9", "--prefill")),
        (("--method", "dense", "--prefill", "quest"), ("--prefill quest", "dense", "leave it out")),
    ],
)
def test_what_it_refuses(place: Path, options: tuple[str, ...], says: tuple[str, ...]) -> None:
    (place / "folder.json").mkdir()
    fails(2, *with_options(QUESTION, *options), says=says)
    assert not (place / "trace.json").exists()


def test_a_page_holds_the_trace_that_is_printed(place: Path) -> None:
    printed = run_here(*QUESTION, "--truth", "--json", "-q", "-o", "trace.html")
    assert printed.code == 0, printed.stderr
    assert read_trace_page(place / "trace.html") == json.loads(printed.stdout)


def test_a_page_takes_the_place_of_no_other_file(place: Path) -> None:
    (place / "mine.html").write_text("<p>Mine.</p>")
    fails(1, *QUESTION, "-o", "mine.html", says=("mine.html exists and is not a page of sparsekv",))
    assert (place / "mine.html").read_text() == "<p>Mine.</p>"


def test_a_trace_takes_the_place_of_an_older_one_and_of_no_other_file(place: Path) -> None:
    (place / "package.json").write_text('{\n  "name": "mine"\n}')
    fails(1, *QUESTION, "-o", "package.json", says=("package.json exists and is not a trace of sparsekv",))
    assert (place / "package.json").read_text().startswith('{\n  "name"')
    (place / "linked.json").symlink_to("trace.json")
    for name in ("trace.json", "trace.json", "linked.json"):
        assert run_here(*QUESTION, "-o", name, "-q").code == 0
    assert (place / "linked.json").is_symlink()
    assert json.loads((place / "trace.json").read_text())["index"] == "doc.skv"


def test_dense_attention_chooses_everything_and_misses_nothing(place: Path) -> None:
    traced = json.loads(run_here(*QUESTION, "--method", "dense", "--truth", "--json", "-q").stdout)
    answer = json.loads(run_here("generate", *QUESTION[1:], "--method", "dense", "--json", "-q").stdout)
    assert (traced["method"], traced["answer"]) == ("dense", answer["text"])
    assert traced["measures"]["recall"] == traced["measures"]["attention_mass"] == 1
    assert traced["measures"]["output_error"] < 1e-5
    assert all(one["stood_for"] == 0 and one["missed"] < 1e-6 for one in traced["records"])


def test_a_passage_in_too_many_places_is_refused(place: Path) -> None:
    fails(2, *QUESTION, "--without", "s", says=("--without s", "more than 64 places"))


def test_a_trace_that_cannot_be_written_leaves_nothing(place: Path) -> None:
    """A limit on a file's size stands for a full disk."""
    done = zygote().run(*QUESTION, "-q", "-o", "trace.json", folder=place, limits={"FSIZE": 10_000})
    assert done.code == 1
    assert "cannot write the trace trace.json: file too large; give --output another name" in done.stderr
    assert not list(place.glob("*trace*"))
