"""`generate --method dense`: dense attention over the stored document, without a prefill of it."""

import json
from pathlib import Path

import pytest
from support.command import fails, run_here, with_options

from sparsekv.runtime import api

ASK = ("generate", "--max-new-tokens", "6", "--model", "model", "--method", "dense", "--json")


def test_answers_are_those_of_everything_read(place: Path) -> None:
    dense = json.loads(run_here(*ASK, "What is 7 times 7?").stdout)
    everything = ("--budget", "100%", "--prefill", "dense", "--method", "squeezed")
    chosen = json.loads(run_here(*with_options(ASK, *everything), "What is 7 times 7?").stdout)
    assert (dense["method"], dense["budget"], dense["kv_fraction"]) == ("dense", 1.0, 1.0)
    assert dense["text"] == chosen["text"]


def test_questions_are_answered_together_as_alone(place: Path) -> None:
    questions = ["What is 7 times 7?", "What is 3 times 3?", "What is 5 times 5?"]
    Path("questions.txt").write_text("\n".join(questions))
    lines = run_here(*ASK, "--batch-file", "questions.txt").stdout.splitlines()
    alone = [json.loads(run_here(*ASK, one).stdout) for one in questions]
    for line, one in zip(map(json.loads, lines), alone, strict=True):
        assert (line["text"], line["kv_fraction"], line["method"]) == (one["text"], 1.0, "dense")


def test_python_asks_densely_too(place: Path) -> None:
    answer = api.open_index("doc.skv", "model").ask("What is 7 times 7?", method="dense")
    assert answer.kv_fraction == 1.0


@pytest.mark.parametrize(
    "option",
    [
        ("--budget", "5%"),
        ("--placement", "disk"),
        ("--prefill", "quoka"),
        ("--rerank", "4"),
        ("--guard", "0.2"),
        ("--gauge",),
        ("--ahead",),
        ("--residual",),
    ],
    ids=lambda option: option[0],
)
def test_what_chooses_means_nothing_beside_it(place: Path, option: tuple[str, ...]) -> None:
    fails(2, "generate", "Why?", "--method", "dense", *option, says=(option[0], "dense", "leave it out"))
