"""The script of the board of real models: answers are never those of another model or of another call."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.doc_pages import ROOT

sys.path.insert(0, str(ROOT / "docs" / "benchmarks"))

import real_models

COMMAND = real_models.Command("org/Small-1.7B", 4096, 0, "vt", None)
TEXT = Path("help.txt")


def test_models_of_one_version_have_names_of_their_own() -> None:
    models = ("org/Small-1.5B", "org/Small-1.7B", "small-1.5b.Q4.gguf", "small-1.5b.Q8.GGUF")
    assert [real_models.name_of(one) for one in models] == [
        "Small-1.5B",
        "Small-1.7B",
        "small-1.5b.Q4",
        "small-1.5b.Q8",
    ]


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(SystemExit, match="have one name"):
        next(real_models.commands(["a/Small", "b/Small"], [4096], ["vt"], 1, real_models.Setting()))


def test_only_answers_of_the_same_call_have_ended(tmp_path: Path) -> None:
    """No command runs, because the time is over."""
    (tmp_path / f"{COMMAND.name}.jsonl").write_text("{}\n")
    (tmp_path / real_models.COMMANDS).write_text(f"{COMMAND.name}\t{COMMAND.line(TEXT)}\n")
    measured = real_models.Measurement(tmp_path, TEXT, 0, 1)
    assert measured.run([COMMAND]) == 0
    others = [
        replace(COMMAND, model="other/Small-1.7B"),
        replace(COMMAND, setting=real_models.Setting(dtype="float16")),
    ]
    assert [measured.run([one]) for one in others] == [1, 1]
    assert real_models.Measurement(tmp_path, Path("other.txt"), 0, 1).run([COMMAND]) == 1


def test_a_page_shows_the_command_of_each_setting(tmp_path: Path) -> None:
    """After a measurement with another dtype that was stopped, a table has answers of both dtypes."""
    halves = replace(COMMAND, seed=2, setting=real_models.Setting(dtype="float16"))
    for one in (COMMAND, replace(COMMAND, seed=1, task="scbench-mf"), halves):
        answer = {"task": one.task, "context": "0", "question": "?", "answer": "1", "score": 100.0, "turn": 1}
        dense = {"method": "dense", "budget": None, "kv_fraction": 1.0}
        (tmp_path / f"{one.name}.jsonl").write_text(json.dumps(answer | dense) + "\n")
        with (tmp_path / real_models.COMMANDS).open("a") as file:
            file.write(f"{one.name}\t{one.line(TEXT)}\n")
    page = real_models.page(tmp_path, "Board", "").split("\n")
    assert [line for line in page if line.startswith(("Command", "The "))] == [
        f"Command of `{COMMAND.name}`: `{COMMAND.line(TEXT)}`",
        "The other files of answers (seed and task): 1-scbench-mf.",
        f"Command of `{halves.name}`: `{halves.line(TEXT)}`",
        "The answers come from commands of 2 settings, and the table mixes them.",
    ]
