"""`eval --pairs`: a person's own questions about the beginning of a text."""

import json
import re
from pathlib import Path

import pytest
from support.command import run_here
from support.tiny_models import tiny_tokenizer

DENSE = ("--model", "model", "--method", "dense", "--max-new-tokens", "1", "--tail", "64")


def _write_pairs(*answers: str) -> None:
    lines = [json.dumps({"question": f"What is {answer}?", "answers": [answer]}) for answer in answers]
    Path("pairs.jsonl").write_text("\n".join(lines))


def test_pairs_are_asked_without_a_task(place: Path) -> None:
    _write_pairs("Line 3 says", "Line 5 says")
    outcome = run_here("eval", "doc.txt", "--pairs", "pairs.jsonl", *DENSE, "--length", "600", "--json", "-q")
    assert outcome.code == 0, outcome.stderr
    (row,) = json.loads(outcome.stdout)["rows"]
    assert (row["task"], row["questions"]) == ("qa", 2)


@pytest.mark.parametrize(
    ("answers", "left"),
    [
        (("Line 3 says", "nowhere"), ""),
        (("Line 3 says", "Line 22 says"), "1 of 2 questions has its answer only after them and is left out; "),
        (
            ("Line 22 says", "Line 3 says", "Line 23 says"),
            "2 of 3 questions have their answers only after them and are left out; ",
        ),
    ],
)
def test_a_cut_text_and_the_questions_about_its_end_are_told(place: Path, answers: tuple[str, ...], left: str) -> None:
    _write_pairs(*answers)
    outcome = run_here("eval", "doc.txt", "--pairs", "pairs.jsonl", *DENSE, "--length", "300", "--raw", "--json")
    assert outcome.code == 0, outcome.stderr
    assert f" tokens of doc.txt; {left}a larger --length takes more\n" in outcome.stderr
    told = re.search(r"asks about the first (\d+) of (\d+) tokens", outcome.stderr)
    assert told is not None
    (row,) = json.loads(outcome.stdout)["rows"]
    assert int(told[1]) == row["tokens"]
    assert int(told[2]) == len(tiny_tokenizer().encode(Path("doc.txt").read_text().rstrip()))


def test_an_uncut_text_is_not_told(place: Path) -> None:
    _write_pairs("Line 3 says")
    outcome = run_here("eval", "doc.txt", "--pairs", "pairs.jsonl", *DENSE, "--length", "900", "--json")
    assert outcome.code == 0, outcome.stderr
    assert "asks about" not in outcome.stderr


def test_one_question_by_one_variant_is_told_as_one_without_an_interval(place: Path) -> None:
    _write_pairs("Line 3 says")
    told = run_here("eval", "doc.txt", "--pairs", "pairs.jsonl", *DENSE, "--length", "900").stderr
    assert "each by 1 variant of attention;" in told
    assert "the intervals of 1 question about 1 context are unknown; ask about 10 contexts or more" in told


def test_expected_answers_that_no_answer_can_reach_are_told(place: Path) -> None:
    """A token of the tiny model is a byte."""
    _write_pairs("Line 3 says", "Line 3 says " + "much more " * 3, "Line 5 says " + "much more " * 9)
    default = [part for part in DENSE if part not in ("--max-new-tokens", "1")]
    few = ("--pairs", "pairs.jsonl", "--length", "900", "--json")
    told = "2 expected answers have more than 32 tokens, after which a model's answer is cut; --max-new-tokens 102 "
    for given, notes in ((default, 1), (DENSE, 0)):
        outcome = run_here("eval", "doc.txt", *few, *given)
        assert outcome.code == 0, outcome.stderr
        assert outcome.stderr.count(told) == notes
