"""`eval --keep-indices` keeps each index that the run builds, and notes that it builds none for stored answers."""

from pathlib import Path

import pytest
from support.command import run_here

ASK = ("--model", "model", "--method", "dense", "--length", "500", "--questions", "1", "--max-new-tokens", "1")


@pytest.mark.usefixtures("place")
def test_contexts_whose_answers_are_stored_have_no_index_to_keep() -> None:
    def notes(contexts: str, *options: str) -> list[str]:
        outcome = run_here("eval", "doc.txt", *ASK, "--tail", "64", "--contexts", contexts, *options)
        assert outcome.code == 0, outcome.stderr
        return [line for line in outcome.stderr.splitlines() if line.startswith("--keep-indices")]

    assert notes("2") == []
    assert len(notes("3", "--keep-indices")) == 1
    assert notes("3", "--keep-indices") == [
        "--keep-indices keeps no index of 2 contexts: all answers were stored, so no index was built; give another "
        "--work to build one"
    ]
    assert notes("3", "--keep-indices", "--work", "other") == []
    assert len(list(Path("doc.eval/indices").glob("*.skv"))) == 1
