"""`generate --sources`: the passages that an answer attended to, with their files and lines."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.command import fails, run_here
from support.sealing import Fields, reseal

from sparsekv.cli.common.console import shortened

ASK = ("generate", "--model", "model", "--max-new-tokens", "6", "-q")
QUESTION = "What is 7 times 7?"


def answered(*options: str) -> dict[str, Any]:
    outcome = run_here(*ASK, *options, "--json")
    assert outcome.code == 0, outcome.stderr
    found: dict[str, Any] = json.loads(outcome.stdout)
    return found


def text_of(place: Path, lines: list[int]) -> str:
    return "\n".join((place / "doc.txt").read_text().splitlines()[lines[0] - 1 : lines[1]])


def test_sources_follow_the_answer_on_stderr(place: Path) -> None:
    outcome = run_here(*ASK, QUESTION, "--sources", "3")
    assert outcome.stdout == run_here(*ASK, QUESTION).stdout
    lines = outcome.stderr.splitlines()[::2]
    assert [line.split(":")[:2] for line in lines] == [["source", " doc"]] * 3
    assert [float(line.split()[-1]) for line in lines] == sorted(
        (float(line.split()[-1]) for line in lines), reverse=True
    )


def test_a_source_shows_its_text(place: Path) -> None:
    """One line of it, cut at 80 columns or the terminal's, and its control characters escaped."""
    outcome = run_here(*ASK, QUESTION, "--sources", "8", "--method", "dense")
    texts = [one["text"] for one in answered(QUESTION, "--sources", "8", "--method", "dense")["sources"]]
    shown = outcome.stderr.splitlines()[1::2]
    document = " ".join((place / "doc.txt").read_text().split())
    for line, text in zip(shown, texts, strict=True):
        assert " ".join(text.split()) in document
        assert len(line) <= 80
        assert line.startswith("    ")
        assert " ".join(text.split()).startswith(line.strip().removesuffix("…"))
        assert line.endswith("…") == (len(" ".join(text.split())) > 76)


def test_a_text_is_one_safe_line_of_the_width() -> None:
    assert shortened("a\n\n b\tc", 9) == "a b c"
    assert shortened("\x1b[31mred\u202e", 99) == "\\x1b[31mred\\u202e"
    assert shortened("中文中文", 5) == "中文…"


def test_sources_are_lines_of_the_document(place: Path) -> None:
    """The sources have different tokens, at most as many as were asked for, and none from the chat template."""
    answer = answered(QUESTION, "--sources", "40")
    taken = set[int]()
    for one in answer["sources"]:
        assert one["path"] == "doc"
        assert 0 < one["score"] <= 1
        assert one["text"] in text_of(place, one["lines"])
        tokens = set(range(*one["tokens"]))
        assert 0 < len(tokens) <= 64
        assert not tokens & taken
        taken |= tokens
    assert 0 not in taken
    assert sum(one["score"] for one in answer["sources"]) <= 1 + 1e-6
    assert len(answered(QUESTION, "--sources", "2")["sources"]) == 2


def test_only_who_asks_gets_sources(place: Path) -> None:
    assert "sources" not in answered(QUESTION)


@pytest.mark.parametrize("method", ["dense", "multipole"])
def test_answers_of_a_batch_have_the_sources_of_single_answers(place: Path, method: str) -> None:
    """Exactly if everything is attended to: a sparse method's questions share what they select."""
    (place / "questions.txt").write_text(f"{QUESTION}\n\nWhy?\n")
    batch = ("--batch-file", "questions.txt", "--method", method, "--sources", "2")
    lines = [json.loads(line) for line in run_here(*ASK, *batch, "--json").stdout.splitlines()]
    assert lines[1]["sources"] == []
    for line, question in zip(lines[::2], (QUESTION, "Why?"), strict=True):
        assert len(line["sources"]) == 2
        if method == "dense":
            alone = answered(question, *batch[2:])["sources"]
            assert [one["tokens"] for one in line["sources"]] == [one["tokens"] for one in alone]
            assert [one["score"] for one in line["sources"]] == pytest.approx([one["score"] for one in alone], rel=1e-3)
    told = run_here(*ASK, *batch).stderr.splitlines()[::2]
    assert [line[: len("question 1: source")] for line in told] == ["question 1: source"] * 2 + [
        "question 3: source"
    ] * 2


def test_a_source_names_its_file_and_the_line_in_it(place: Path) -> None:
    """The index is of a document of several files. Text between files belongs to no file."""
    whole = answered(QUESTION, "--sources", "1", "--method", "dense")["sources"][0]
    start, stop = whole["tokens"]
    files = [
        {"path": "a.md", "sha256": "0" * 64, "start": start - 40, "stop": start - 20},
        {"path": "src/b.py", "sha256": "0" * 64, "start": start, "stop": stop, "first_line": 11},
    ]

    def several(fields: Fields) -> None:
        fields["prompt"]["files"] = files

    reseal(place / "doc.skv", several)
    found = answered(QUESTION, "--sources", "5", "--method", "dense")["sources"]
    assert {one["path"] for one in found} == {"a.md", "src/b.py"}
    first = found[0]
    assert (first["path"], first["tokens"]) == ("src/b.py", whole["tokens"])
    assert first["lines"] == [11, 11 + whole["lines"][1] - whole["lines"][0]]
    assert first["page"] is None
    assert all(start - 40 <= one["tokens"][0] < one["tokens"][1] <= start - 20 for one in found[1:])


def test_a_source_names_its_page(place: Path) -> None:
    """The index is of a PDF whose third page is one token, the first token of the source."""
    start = answered(QUESTION, "--sources", "1", "--method", "dense")["sources"][0]["tokens"][0]

    def of_pdf(fields: Fields) -> None:
        fields["prompt"]["pages"] = [1, start - 1, start, start + 1]

    reseal(place / "doc.skv", of_pdf)
    assert answered(QUESTION, "--sources", "1", "--method", "dense")["sources"][0]["page"] == 3
    outcome = run_here(*ASK, QUESTION, "--sources", "1", "--method", "dense")
    assert outcome.stderr.startswith("source: doc p. 3  0.")


REFUSED = [
    (("--sources", "0"), "--sources 0: give a whole number from 1 to 64"),
    (("--sources", "three"), "--sources three: give a whole number from 1 to 64"),
    (("--sources", "65"), "--sources 65: give a whole number from 1 to 64"),
    (("--sources", "2", "--method", "multipole", "--stream"), "--sources cannot be used with --stream"),
]


@pytest.mark.parametrize(("options", "told"), REFUSED, ids=lambda one: str(one)[:40])
def test_refusals(place: Path, options: tuple[str, ...], told: str) -> None:
    fails(2, *ASK, QUESTION, *options, says=(told,))


def test_the_help_says_that_a_source_names_a_line() -> None:
    assert "manual:77 is line 77 of the document" in " ".join(run_here("generate", "--help").stdout.split())
