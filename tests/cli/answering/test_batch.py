"""Answers of a batch match the lines of its file, one to one, or none is given at all."""

import json
import os
from pathlib import Path

import pytest
from support.command import run_here, shell
from support.tiny_models import POSITIONS

from sparsekv.formats.index.manifest import read_manifest

ASK = ("generate", "--max-new-tokens", "3", "-q")
LINES = ("Why?", "", "A\u2028B\x0cC\x1cD\x85E?", " \t", "What is 3 times 3?")


def _records(*arguments: str) -> list[dict[str, object]]:
    outcome = run_here(*ASK, "--json", *arguments)
    assert outcome.code == 0, outcome.stderr
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def test_each_line_has_its_answer_and_a_blank_one_a_blank_answer(place: Path) -> None:
    Path("questions.txt").write_bytes("\r\n".join(LINES).encode())
    records = _records("--batch-file", "questions.txt", "--batch-size", "1")
    assert [one["question"] for one in records] == [line.strip(" \t") for line in LINES]
    single = [_records(line)[0] if line.strip() else None for line in LINES]
    assert [one["text"] for one in records] == ["" if one is None else one["text"] for one in single]
    assert {tuple(one) for one in records} == {tuple(records[0])}
    assert len({tuple(one) for one in _records("--batch-file", "questions.txt", "--stats", "--guard", "0.2")}) == 1
    Path("questions.txt").write_text("Why?\n\nWhy?\n")
    shown = run_here(*ASK, "--batch-file", "questions.txt")
    assert shown.code == 0, shown.stderr
    first, blank, second, end = shown.stdout.split("\n")
    assert (first, blank, end) == (second, "", "")


def test_it_is_told_how_many_answers_were_cut(place: Path) -> None:
    Path("questions.txt").write_text("Why?\n\nWhere?\n")
    arguments = ("generate", "--max-new-tokens", "3", "--batch-file", "questions.txt")
    assert run_here(*arguments).stderr.endswith("answers that were cut (--max-new-tokens): 2 of 2; --json says which\n")
    assert "were cut" not in run_here(*arguments, "--json").stderr
    left = POSITIONS - read_manifest(place / "doc.skv").split.tokens
    Path("questions.txt").write_text(f"Why?\n{'y' * (left - 60)}\n")
    told = run_here("generate", "--max-new-tokens", "60", "--batch-file", "questions.txt", "--budget", "5%").stderr
    for why in ("--max-new-tokens", "the model has no more positions"):
        assert f"answers that were cut ({why}): 1 of 2; --json says which\n" in told


def test_an_answer_says_what_prefilled_its_question(place: Path) -> None:
    Path("questions.txt").write_text("Why?\n")
    for prefill in ("dense", "own"):
        (alone,), (of_batch,) = (
            _records(*asked, "--prefill", prefill) for asked in (["Why?"], ["--batch-file", "questions.txt"])
        )
        assert alone["settings"] == of_batch["settings"]
        assert isinstance(alone["settings"], dict)
        assert alone["settings"]["prefill"] == prefill


def test_parameters_have_the_types_of_their_options(place: Path) -> None:
    Path("questions.txt").write_text("Why?\n")
    hierarchical = ("--method", "squeezed", "--lookup", "hierarchical", "--opened", "3")
    (record,) = _records("--batch-file", "questions.txt", *hierarchical)
    settings = record["settings"]
    assert isinstance(settings, dict)
    told = {"lookup": "hierarchical", "opened": 3.0, "selection": "budget"}
    assert json.dumps(settings["parameters"]) == json.dumps(told)


def test_a_question_that_is_too_long_is_named_by_its_line_before_any_answer(place: Path) -> None:
    Path("questions.txt").write_text("Why?\n\n" + "why " * 2000)
    outcome = run_here(*ASK, "--batch-file", "questions.txt")
    assert outcome.code == 2
    assert outcome.error().startswith("questions.txt line 3: document and question have ")


def test_a_byte_order_mark_is_no_part_of_a_question(place: Path) -> None:
    Path("plain.txt").write_text("Why?\n")
    Path("marked.txt").write_bytes(b"\xef\xbb\xbfWhy?\r\n")
    plain, marked = (_records("--prompt-file", name)[0] for name in ("plain.txt", "marked.txt"))
    assert (marked["text"], marked["prompt_tokens"]) == (plain["text"], plain["prompt_tokens"])


def test_a_carriage_return_alone_ends_a_line_too(place: Path) -> None:
    """As spreadsheets of a Mac save text. Beside newlines it is a character like others."""
    for content, lines in ((b"Why?\r\rWhere?\r", ["Why?", "", "Where?"]), (b"Why?\rWhere?\n", ["Why?\rWhere?"])):
        Path("questions.txt").write_bytes(content)
        assert [one["question"] for one in _records("--batch-file", "questions.txt")] == lines


def test_questions_from_a_slow_command_are_waited_for(place: Path) -> None:
    done = shell(
        "sparsekv generate -q --max-new-tokens 2 --batch-file <(sleep 1; echo Why?; sleep 1; echo How?)", place
    )
    assert (done.returncode, done.stdout.count("\n")) == (0, 2), done.stderr


def test_questions_in_utf_16_are_read_by_their_byte_order_mark(place: Path) -> None:
    questions = "Why, Zoë?\nHow?\n"
    Path("plain.txt").write_text(questions, encoding="utf-8")
    Path("wide.txt").write_text(questions, encoding="utf-16")
    plain, wide = (run_here(*ASK, "--batch-file", name) for name in ("plain.txt", "wide.txt"))
    assert (plain.code, wide.code, wide.stdout) == (0, 0, plain.stdout), wide.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\n \n\t\n", ("--batch-file bad.txt holds no question",)),
        (b"caf\xe9\n", ("--batch-file bad.txt is not text in UTF-8 at byte offset 3;",)),
        (
            "Why?\n".encode("utf-16-le"),
            ("--batch-file bad.txt contains zero bytes, as UTF-16 text does; convert it to UTF-8 first",),
        ),
        (None, ("--batch-file bad.txt is a folder",)),
    ],
)
def test_a_file_of_no_questions(place: Path, content: bytes | None, says: tuple[str, ...]) -> None:
    if content is None:
        os.mkdir("bad.txt")
    else:
        Path("bad.txt").write_bytes(content)
    outcome = run_here(*ASK, "--batch-file", "bad.txt")
    assert outcome.code == 2
    assert all(part in outcome.error() for part in says), outcome.stderr


def test_a_file_that_never_ends_is_given_up(place: Path) -> None:
    outcome = run_here(*ASK, "--prompt-file", "/dev/zero")
    assert outcome.code == 2
    assert "--prompt-file /dev/zero is longer than 256 MiB" in outcome.error()


def test_a_small_budget_and_reading_more_than_everything_are_told(place: Path) -> None:
    few = run_here("generate", "Why?", "--max-new-tokens", "2", "--budget", "5")
    assert "--budget 5 is 5 tokens of the document; 5% is written 5% or 0.05\n" in few.stderr
    assert "--budget" not in run_here("generate", "Why?", "--max-new-tokens", "2", "--budget", "5%").stderr
    one = run_here("recall-report", "--budget", "1", "--method", "window")
    assert "--budget 1 is one token of the document; 1% is written 1% or 0.01\n" in one.stderr
    for command in (("generate", "Why?", "--max-new-tokens", "2"), ("recall-report", "--method", "window")):
        many = run_here(*command, "--budget", "99999")
        assert many.code == 0
        assert many.stderr.count("--budget 99999 is more than the ") == 1
        assert " tokens between sinks and tail: each step reads all of them\n" in many.stderr
    full = run_here("generate", "Why?", "--max-new-tokens", "2", "--budget", "100%", "--stats", "--method", "squeezed")
    assert (
        "more than all keys and values: it reads its index beside the selected keys and values; --method dense"
        in full.stderr
    )
    report = run_here("recall-report", "--budget", "100%", "--method", "squeezed", "-q")
    assert "\nkv fraction above 1 (squeezed" in report.stdout
    assert "above 1" not in run_here("recall-report", "--budget", "0.1", "--method", "squeezed", "-q").stdout
    together = run_here("recall-report", "--budget", "100%", "--method", "squeezed", "--together", "2", "-q")
    assert "together): each query may read parts of the index for itself" in " ".join(together.stdout.split())
