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
        ("--dense-layers", "1"),
    ],
    ids=lambda option: option[0],
)
def test_what_chooses_means_nothing_beside_it(place: Path, option: tuple[str, ...]) -> None:
    fails(2, "generate", "Why?", "--method", "dense", *option, says=(option[0], "dense", "leave it out"))


SPARSE = ("--method", "keydiff", "--budget", "5%")


def test_all_layers_dense_are_dense_attention(place: Path) -> None:
    dense = json.loads(run_here(*ASK, "What is 7 times 7?").stdout)
    layers = json.loads(run_here(*with_options(ASK, *SPARSE, "--dense-layers", "3"), "What is 7 times 7?").stdout)
    assert (layers["text"], layers["kv_fraction"]) == (dense["text"], 1.0)


@pytest.mark.parametrize("placement", ["device", "host", "disk"])
def test_the_first_layers_read_everything_and_the_others_what_is_chosen(place: Path, placement: str) -> None:
    sparse, mixed = (
        json.loads(run_here(*with_options(ASK, *SPARSE, *more, "--placement", placement), "What is 7 times 7?").stdout)
        for more in ((), ("--dense-layers", "1"))
    )
    assert mixed["kv_fraction"] == pytest.approx((1 + 2 * sparse["kv_fraction"]) / 3)
    assert (sparse["settings"]["dense_layers"], mixed["settings"]["dense_layers"]) == (None, 1)


def test_questions_share_the_steps_of_layers_of_both_kinds(place: Path) -> None:
    Path("questions.txt").write_text("Why?\nWhy?\n")
    asked = with_options(ASK, *SPARSE, "--dense-layers", "2")
    alone = json.loads(run_here(*asked, "Why?").stdout)
    lines = run_here(*asked, "--batch-file", "questions.txt", "--batch-size", "2").stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == [alone["text"]] * 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--dense-layers", "-1"), ("--dense-layers -1", "0 to 3")),
        (("--dense-layers", "4"), ("--dense-layers 4", "0 to 3")),
        (
            ("--dense-layers", "1", "--method", "tidaldecode"),
            ("--dense-layers 1", "tidaldecode has dense layers of its own"),
        ),
    ],
    ids=["negative", "too-many", "its-own"],
)
def test_layers_that_there_are_not(place: Path, options: tuple[str, ...], says: tuple[str, ...]) -> None:
    fails(2, "generate", "Why?", "--model", "model", *options, says=says)
