"""`eval --data`: documents of published data that cannot be indexed."""

import json
from pathlib import Path

import pytest
from support.command import run_here

SHORT, ENDS = "Too short.", ("--tail", "64", "--sinks", "4")
ASK = ("eval", "--data", "data.jsonl", "--format", "prefixqa", "--model", "model", "--method", "dense", *ENDS)


def _write(*texts: str) -> None:
    records = [{"context": text, "questions": ["What is it?"], "answers": ["it"]} for text in texts]
    Path("data.jsonl").write_text("\n".join(map(json.dumps, records)))


@pytest.mark.parametrize("first", [True, False])
def test_a_document_that_is_too_short_is_left_out_with_its_line(place: Path, *, first: bool) -> None:
    long = (place / "doc.txt").read_text()
    _write(*([SHORT, long] if first else [long, SHORT]))
    outcome = run_here(*ASK, "--max-new-tokens", "2", "--json")
    assert outcome.code == 0, outcome.stderr
    (row,) = json.loads(outcome.stdout)["rows"]
    assert (row["contexts"], row["questions"]) == (1, 1)
    (line,) = [one for one in outcome.stderr.splitlines() if one.startswith("left out: ")]
    assert f"left out: prefixqa, line {1 if first else 2}: the document is too short to index: it has " in line
    assert line.endswith("; give a longer document, or give --tail 6 (at most 11)")


@pytest.mark.parametrize(("length", "cut"), [("120", True), ("9000", False)])
def test_documents_without_their_middle_have_a_line(place: Path, *, length: str, cut: bool) -> None:
    """Where an answer is not known, a cut may remove it, so that even dense attention must answer wrongly."""
    record = {"context": (place / "doc.txt").read_text(), "questions": ["Who?"], "answers": ["nobody in it"]}
    Path("data.jsonl").write_text(json.dumps(record))
    outcome = run_here(*ASK, "--max-new-tokens", "1", "--length", length)
    assert outcome.code == 0, outcome.stderr
    told = "1 of 1 documents of data.jsonl lack their middle, and perhaps an answer: they are cut to "
    assert (told in outcome.stderr) == cut, outcome.stderr


@pytest.mark.parametrize(("prefills", "named"), [(("keydiff", "dense"), True), (("dense",), False)])
def test_the_prefill_that_all_are_compared_with_is_named_beside_others(
    place: Path, prefills: tuple[str, ...], named: bool
) -> None:
    _write((place / "doc.txt").read_text())
    outcome = run_here(*ASK, "--max-new-tokens", "2", *(part for one in prefills for part in ("--prefill", one)), "-q")
    assert outcome.code == 0, outcome.stderr
    table = " ".join(outcome.stdout.split())
    assert (f"compared with dense attention after the {prefills[0]} prefill" in table) == named


def test_documents_that_are_all_too_short_are_refused_before_any_work(place: Path) -> None:
    _write(SHORT, SHORT)
    outcome = run_here(*ASK)
    assert outcome.code == 2
    assert outcome.stderr.count("\n") == 1
    assert "prefixqa, line 1 (and 1 more): the document is too short to index: it has " in outcome.stderr
    assert outcome.stderr.endswith("; give a longer document, or give --tail 6 (at most 11)\n")
    assert not (place / "data.eval").exists()
