"""`--weights`: commands load a model with the weights that its index was built with."""

import json
import shutil
from pathlib import Path

import pytest
from support.command import fails, run_here
from support.tiny_models import FAMILIES

from sparsekv.formats.index.manifest import read_manifest

ASK = ("generate", "--max-new-tokens", "6", "--model", "model", "--method", "dense", "--json", "-q")


@pytest.fixture(scope="module")
def int8(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of the document by a model of rounded weights, to be copied, never changed."""
    folder = tmp_path_factory.mktemp("rounded") / "int8.skv"
    options = ("--model", built / "model", "--weights", "int8", "--method", "multipole", "-q")
    outcome = run_here("build-index", built / "doc.txt", "-o", folder, *options)
    assert outcome.code == 0, outcome.stderr
    return folder


@pytest.fixture
def rounded(place: Path, int8: Path) -> Path:
    """The current folder, with `int8.skv` of the document."""
    shutil.copytree(int8, place / "int8.skv")
    return place


def test_commands_load_a_model_as_the_index_was_built(rounded: Path) -> None:
    question = "What is 7 times 7?"
    text = json.loads(run_here(*ASK, "-i", "int8.skv", question).stdout)["text"]
    assert json.loads(run_here(*ASK, "-i", "int8.skv", "--weights", "int8", question).stdout)["text"] == text
    Path("more.txt").write_text("Line 24 says that 24 times 24 is 576.\n")
    for command in (
        ("append", "-i", "int8.skv", "more.txt", "--model", "model", "-q"),
        ("build-index", "int8.skv", "--method", "squeezed", "--model", "model", "-q"),
        ("trace", "-i", "int8.skv", question, "--model", "model", "--max-new-tokens", "2", "--json", "-q"),
    ):
        outcome = run_here(*command)
        assert outcome.code == 0, outcome.stderr
    inspection = json.loads(run_here("inspect", "-i", "int8.skv", "--json").stdout)
    assert inspection["model"]["weights"] == "int8"
    assert sorted(inspection["methods"]) == ["multipole", "squeezed"]
    assert "float32, int8 weights" in " ".join(run_here("inspect", "-i", "int8.skv").stdout.split())


def test_a_build_without_the_option_rounds_no_weights_as_its_help_says(rounded: Path) -> None:
    built = run_here("build-index", "doc.txt", "-o", "int8.skv", "--model", "model", "--method", "multipole")
    assert "int8.skv was built with --weights int8, unlike this call: keys, values and methods" in built.stderr
    assert read_manifest(rounded / "int8.skv").model.weights is None
    told = " ".join(run_here("build-index", "--help").stdout.split())
    assert "auto: not rounded. An existing index with int8 or int4 weights is then built again." in told


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "Why?"),
        ("append", "doc.txt", "--rebuild"),
        ("trace", "Why?"),
        ("recall-report", "--queries", "doc.txt"),
        ("tune", "--target-perplexity", "1.1", "--dry-run"),
    ],
    ids=lambda command: command[0],
)
def test_other_weights_are_refused_in_one_line(rounded: Path, command: tuple[str, ...]) -> None:
    says = ("--weights int4: the index was built with int8 weights", "build the index again with --weights int4")
    fails(2, *command, "-i", "int8.skv", "--model", "model", "--weights", "int4", says=says)
    plain = "--weights int4: the index was built with the checkpoint's weights"
    fails(2, *command, "-i", "doc.skv", "--model", "model", "--weights", "int4", says=(plain, "leave the option out"))


def test_values_and_places_that_mean_nothing(rounded: Path) -> None:
    fails(2, "build-index", "doc.txt", "--weights", "int9", says=("--weights int9", "auto, int8, int4"))
    fails(2, "generate", "Why?", "-i", "int8.skv", "--weights", "int9", says=("--weights int9", "auto, int8, int4"))
    fails(2, "recall-report", "-i", "int8.skv", "--weights", "int8", says=("--weights int8", "--queries"))
    fails(2, "build-index", "int8.skv", "--weights", "int8", says=("--weights", "int8.skv is an index"))


def test_models_are_timed_with_each_kind_of_weights(tmp_path: Path) -> None:
    FAMILIES["qwen3"]().config.save_pretrained(tmp_path / "qwen3")
    options = ("--context", "600", "--method", "window", "--budget", "10%", "--runs", "2", "--compile", "off", "-q")
    weights = ("--weights", "auto", "--weights", "int8", "--weights", "int4")
    outcome = run_here("bench-model", "--config", str(tmp_path / "qwen3"), *options, *weights, "--json")
    assert outcome.code == 0, outcome.stderr
    rows = json.loads(outcome.stdout)["rows"]
    assert [row["weights"] for row in rows] == [None] * 4 + ["int8"] * 4 + ["int4"] * 4
    for first in (0, 4, 8):
        dense = rows[first]
        for row in rows[first : first + 4]:
            assert row["speedup"] == pytest.approx(row["tokens_per_second"] / dense["tokens_per_second"])
    table = run_here("bench-model", "--config", str(tmp_path / "qwen3"), *options, *weights[2:4]).stdout
    assert "weights" in table
