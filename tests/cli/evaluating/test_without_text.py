"""`eval` of tasks that generate all of their text."""

import json
from pathlib import Path

import pytest
from support.command import run_here

from sparsekv.runtime.tasks.interface import tasks

GENERATED = [name for name, task in tasks().items() if not task.needs_text]
ASK = ("--model", "model", "--method", "dense", "--contexts", "1", "--max-new-tokens", "1", "-q")


@pytest.mark.parametrize("name", GENERATED)
def test_a_task_asks_the_same_with_a_text_and_without(place: Path, name: str) -> None:
    found = {}
    for document in ((), ("doc.txt",)):
        size = ("--task", name, "--length", "1500", "--tail", "64", "--json", "--answers", "all.jsonl")
        questions = () if "--questions" in tasks()[name].unread else ("--questions", "1")
        outcome = run_here("eval", *document, *size, *ASK, *questions)
        assert outcome.code == 0, outcome.stderr
        found[document] = json.loads(Path("all.jsonl").read_text())
    one, other = found.values()
    assert one["document"] == "generated"
    assert (place / "generated.eval").is_dir()
    same = ("task", "context", "tokens", "question", "expected", "answer", "score")
    assert [one[name] for name in same] == [other[name] for name in same]


def test_there_are_such_tasks() -> None:
    assert {"fwe", "niah-multikey-2", "niah-multikey-3", "scbench-kv", "scbench-many-shot"} <= set(GENERATED)
    assert not {"cwe", "niah-facts", "qa", "scbench-vt", "vt"} & set(GENERATED)
