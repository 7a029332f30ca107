"""Settings of a model's generation_config.json by which transformers would answer otherwise are told."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.command import run_here
from support.tiny_models import END

ASK = ("generate", "--index", "doc.skv", "--model", "theirs", "--max-new-tokens", "1", "Why?")
EVAL = ("eval", "doc.txt", "--pairs", "pairs.jsonl", "--model", "theirs", "--method", "dense", "--max-new-tokens", "1")
TOLD = "the model's generation_config.json sets {}, which answers over an index do not use"


def _with_settings(place: Path, **settings: Any) -> None:
    shutil.copytree(place / "model", place / "theirs")
    (place / "theirs" / "generation_config.json").write_text(json.dumps({"eos_token_id": END, **settings}))
    (place / "pairs.jsonl").write_text('{"question": "What is 7 times 7?", "answer": "49"}\n')


@pytest.mark.parametrize("command", [ASK, (*EVAL, "--length", "300")], ids=lambda command: command[0])
def test_they_are_told_unless_quiet(place: Path, command: tuple[str, ...]) -> None:
    _with_settings(place, repetition_penalty=1.1, suppress_tokens=[3, 5], temperature=0.7, do_sample=True)
    outcome = run_here(*command)
    assert outcome.code == 0, outcome.stderr
    assert TOLD.format("repetition_penalty 1.1, suppress_tokens") in outcome.stderr.splitlines()
    assert "generation_config" not in run_here(*command, "-q").stderr


def test_those_that_change_no_greedy_answer_are_not(place: Path) -> None:
    _with_settings(place, repetition_penalty=1.0, no_repeat_ngram_size=0, num_beams=1, top_p=0.8, min_new_tokens=None)
    outcome = run_here(*ASK)
    assert outcome.code == 0, outcome.stderr
    assert "generation_config" not in outcome.stderr


def test_numbers_of_0_and_1_are_told_where_they_change_an_answer(place: Path) -> None:
    """No token twice, no end as the first token, and token 0 as the last one."""
    changing = {"no_repeat_ngram_size": 1, "min_new_tokens": 1, "forced_eos_token_id": 0}
    _with_settings(place, **changing, repetition_penalty=1, suppress_tokens=[], guidance_scale=1)
    outcome = run_here(*ASK)
    assert outcome.code == 0, outcome.stderr
    assert TOLD.format(", ".join(f"{name} {value}" for name, value in changing.items())) in outcome.stderr.splitlines()
