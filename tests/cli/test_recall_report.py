"""Tests of the output of `recall-report`: table, CSV and JSON have the same names, ordered rows and a marked front."""

import csv
import json
import shutil
from io import StringIO
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.command import run_here
from support.sealing import Fields, Tensors, change_tensors, reseal

REPORT = ("recall-report", "--method", "squeezed", "--method", "quest", "--method", "oracle", "--budget", "10%", "-q")
PNG = b"\x89PNG"


def printed(*options: str) -> str:
    outcome = run_here(*REPORT, *options)
    assert outcome.code == 0, outcome.stderr
    return outcome.stdout


def test_methods_without_a_row_are_told_where_none_was_named(place: Path) -> None:
    told = run_here("recall-report", "--budget", "10%").stderr
    lacking = told[told.index("this index lacks ") :]
    assert "csattention" in lacking.partition(";")[0]
    assert "`sparsekv build-index doc.skv --method " in lacking
    assert "this index lacks" not in run_here(*REPORT[:-1]).stderr


def test_the_budget_that_answers_have_is_measured_by_default(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsekv.runtime.methods.codes.ENOUGH", 7)  # as if the document were long
    assert run_here("build-index", "doc.skv", "--method", "codes", "-q").code == 0
    asked = run_here("generate", "Why?", "--method", "codes", "--stats", "--max-new-tokens", "1")
    assert "answers by codes, budget 1.5%" in asked.stderr
    rows = json.loads(run_here("recall-report", "--method", "codes", "--json").stdout)["rows"]
    assert {row["budget"] for row in rows} == {0.015, 0.02, 0.05, 0.1}


def test_csv_and_json_have_the_same_names_and_the_tables_are_theirs(place: Path) -> None:
    columns = csv.DictReader(StringIO(printed("--csv"))).fieldnames
    assert columns is not None
    rows = json.loads(printed("--json"))["rows"]
    assert [*rows[0]] == [*columns]
    head = " ".join(printed().split("──")[0].split()).split("prefill dense")[1]  # wherever the title is wrapped
    words = {word for name in columns for word in name.split("_")}
    assert set(head.split()) <= words
    for word in ("selected", "tokens", "attention", "output", "error", "kv", "fraction", "missed"):
        assert word in head.split()


def test_rows_over_all_are_not_among_the_detail_of_csv_and_are_in_json(place: Path) -> None:
    rows = list(csv.DictReader(StringIO(printed("--csv", "--by", "layer"))))
    assert {row["layer"] for row in rows} == {"0", "1", "2"}
    layers = {row["layer"] for row in json.loads(printed("--json", "--by", "layer"))["rows"]}
    assert layers == {None, 0, 1, 2}


def test_the_table_is_in_the_order_of_errors_and_marks_the_front(place: Path) -> None:
    expected = sorted(json.loads(printed("--json"))["rows"], key=lambda row: row["output_error"])
    lines = [line for line in printed().splitlines() if " 10% " in line]
    assert all(f"{row['output_error']:.4f}" in line for row, line in zip(expected, lines, strict=True))
    assert [line.lstrip().startswith("*") for line in lines] == [row["front"] for row in expected]
    assert "*: on the Pareto front" in printed()


def test_the_legend_explains_odd_rows_where_they_are_there_alone(place: Path) -> None:
    told = {
        "oracle": "known in hindsight",
        "window": "so it has a star whatever its error",
        "quoka": "reads every key to choose",
        "sampleattention": "chooses the oracle's tokens",
        "tidaldecode": "because some of its layers attend to all tokens",
        "squeezed": "missed estimate: a step's own estimate of missed",
    }
    for name in told:
        legend = run_here("recall-report", "--method", name, "--budget", "10%", "-q").stdout.partition("*: on the")[2]
        said = {other for other, words in told.items() if words in legend}
        assert said - {"quoka"} == {name} - {"quoka"}, legend
        assert ("quoka" in said) == (name in ("quoka", "sampleattention")), legend


def test_a_budget_of_everything_makes_no_method_rank_by_exact_attention(place: Path) -> None:
    legend = run_here("recall-report", "--method", "quoka", "--budget", "100%", "-q").stdout.partition("*: on the")[2]
    assert "reads every key to choose" in legend
    assert "chooses the oracle's tokens" not in legend


def test_all_methods_are_drawn_on_a_slide(place: Path) -> None:
    outcome = run_here("recall-report", "--budget", "5%", "--budget", "10%", "--plot", "all.png", "-q")
    assert outcome.code == 0, outcome.stderr
    picture = Path("all.png").read_bytes()
    assert picture.startswith(PNG)
    width, height = (int.from_bytes(picture[place : place + 4]) for place in (16, 20))
    assert (width, height) == (1920, 1080)


def test_attention_that_is_not_finite_is_nothing_to_compare(place: Path) -> None:
    def change(fields: Fields) -> None:
        fields["layers"][0]["softmax_scale"] = 1e300

    reseal(place / "doc.skv", change)
    refused = run_here("recall-report", "--method", "quest", "-q")
    assert refused.code == 1
    assert "attention in layer 0 of doc.skv is not finite, so there is nothing to compare" in refused.stderr


def test_a_head_without_values_is_compared_as_any_other(place: Path) -> None:
    def change(rows: Tensors) -> Tensors:
        rows["values"][0] = 0
        return rows

    change_tensors(place / "doc.skv", "context/layer_001.safetensors", change)
    report = run_here("recall-report", "--method", "quest", "--json", "--by", "layer,head", "-q")
    assert report.code == 0, report.stderr
    rows = json.loads(report.stdout)["rows"]
    errors = {row["output_error"] for row in rows if (row["layer"], row["kv_head"]) == (1, 0)}
    assert errors == {0.0}


def test_queries_that_attend_to_sinks_and_tail_alone_are_compared(place: Path) -> None:
    """Nothing of their attention is left for the middle, in the numbers that there are."""
    shutil.copytree(place / "model", place / "sharp")
    weights = load_file(place / "sharp" / "model.safetensors")
    sharp = {name: 3000 * one if "q_proj.weight" in name else one for name, one in weights.items()}
    save_file(sharp, place / "sharp" / "model.safetensors", {"format": "pt"})
    build = ("build-index", "doc.txt", "--model", "sharp", "--method", "multipole", "-o", "sharp.skv", "-q")
    assert run_here(*build).code == 0
    report = run_here("recall-report", "--index", "sharp.skv", "--budget", "10%", "--method", "quest", "-q")
    assert report.code == 0, report.stderr
