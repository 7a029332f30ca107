"""`eval --pairs`: a person's own questions about the beginning of a text."""

import json
from pathlib import Path

from support.command import run_here

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
