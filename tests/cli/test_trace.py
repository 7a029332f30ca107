"""`sparsekv trace`: an answer on stdout, or its trace, which a schema describes; and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.command import Outcome, fails, run_here
from support.forked import zygote
from support.trace_document import synthetic_trace

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


@pytest.mark.parametrize("options", [(), ("--truth",), ("--method", "squeezed", "--residual"), ("--prefill", "dense")])
def test_json_is_what_the_schema_says(place: Path, options: tuple[str, ...]) -> None:
    document = _traced(*options)
    assert document["truth"] == ("--truth" in options)
    assert (document["measures"]["recall"] is not None) == document["truth"]
    assert document["question"] == QUESTION[1]
    assert "without" not in document
    assert "".join("".join(one["tokens"]) for one in document["passages"]).count("Line ") == 40


def test_a_dense_prefill_chooses_everything_for_the_first_token(place: Path) -> None:
    first = [one for one in _traced("--prefill", "dense", "--truth")["records"] if one["token"] == 0]
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
    assert "log-probability of the first answer -" in outcome.stderr


def test_a_made_up_trace_is_valid_and_adds_up() -> None:
    """What the tests of pages draw has the form of what the command prints."""
    document = synthetic_trace(2000, 3, 2, 2, seed=1)
    _is_valid(document)
    assert sum(len(one["tokens"]) for one in document["passages"]) == document["n_context"]
    for one in document["records"]:
        assert one["exact"] + one["chosen"] + one["stood_for"] + one["missed"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-o", "trace.txt"), ("-o trace.txt", "ends in .json")),
        (("-o", "trace"), ("-o trace", "ends in .json")),
        (("-o", "none/trace.json"), ("-o none/trace.json: its folder does not exist", "make it first")),
        (("-o", f"{'n' * 255}.json"), ("the name is too long", "shorter")),
        (("-o", "folder.json"), ("-o folder.json is a folder", "name of a file")),
        (("--without", "No such line."), ("--without No such line.", "no such passage", "copy it from the document")),
        (("--without", " "), ("--without is empty", "give a passage")),
        (("--stream",), ("--stream", "leave it out")),
        (("--max-new-tokens", "0"), ("--max-new-tokens 0",)),
        (("--budget", "0"), ("--budget 0",)),
        (("--prefill-budget", "9"), ("--prefill-budget 9", "--prefill")),
    ],
)
def test_what_it_refuses(place: Path, options: tuple[str, ...], says: tuple[str, ...]) -> None:
    (place / "folder.json").mkdir()
    fails(2, *QUESTION, *options, says=says)
    assert not (place / "trace.json").exists()


def test_a_passage_in_too_many_places_is_refused(place: Path) -> None:
    fails(2, *QUESTION, "--without", "s", says=("--without s", "more than 64 places"))


def test_a_trace_that_cannot_be_written_leaves_nothing(place: Path) -> None:
    """A limit on a file's size stands for a full disk."""
    done = zygote().run(*QUESTION, "-q", "-o", "trace.json", folder=place, limits={"FSIZE": 10_000})
    assert done.code == 1
    assert "cannot write the trace trace.json: file too large; give -o another name" in done.stderr
    assert not list(place.glob("*trace*"))
