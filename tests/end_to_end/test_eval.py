"""The evaluation as a person runs it: what it writes, and that it goes on where it was killed with the same numbers."""

import csv
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.command import run_here
from support.killed import Command
from support.python_help import DOCUMENT
from support.tiny_models import save_tiny

from sparsekv.formats.index.manifest import read_manifest

TASKS = ("--task", "niah-multikey", "--task", "perplexity", "--length", "500", "--contexts", "2", "--questions", "2")
WAYS = ("--method", "oracle", "--method", "multipole", "--budget", "5%", "--budget", "100%", "--max-new-tokens", "6")
SMALL = (*TASKS, *WAYS, "--sinks", "4", "--tail", "16", "-q")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and a document."""
    folder = tmp_path_factory.mktemp("eval")
    save_tiny(folder / "model")
    (folder / "doc.txt").write_text(DOCUMENT[:40_000], encoding="utf-8")
    return folder


def _small(place: Path, work: Path, *more: str | Path) -> tuple[str | Path, ...]:
    """The command; of options that take one value the last given counts."""
    options = [*SMALL, *more]
    for name in ("--contexts", "--questions", "--max-new-tokens", "--sinks"):
        while options.count(name) > 1:
            del options[options.index(name) : options.index(name) + 2]
    return ("eval", place / "doc.txt", "--model", place / "model", "--work", work, *options)


def _run(*arguments: str | Path) -> str:
    outcome = run_here(*arguments)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr == ""
    return outcome.stdout


def _rows(stdout: str) -> list[dict[str, Any]]:
    """But for the seconds, which no two runs share."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in json.loads(stdout)["rows"]]


def _answers(work: Path) -> dict[str, tuple[str, float | None]]:
    lines = (work / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert len({record["key"] for record in records}) == len(records), "an answer was given twice"
    return {record["key"]: (record["text"], record["loss"]) for record in records}


@pytest.fixture(scope="module")
def straight(place: Path) -> tuple[Path, str]:
    """A whole run: its folder, and what it wrote as JSON."""
    return place / "straight", _run(*_small(place, place / "straight", "--json", "--plot", place / "x.png"))


def test_answers_over_keys_and_values_in_8_bits_are_their_own(place: Path, straight: tuple[Path, str]) -> None:
    """In the folder of those over exact ones, of which none is taken; and of these none is asked again."""
    work = shutil.copytree(straight[0], place / "in 8 bits")
    exact = _answers(work)
    stored = ("--kv-dtype", "int8", "--keep-indices")
    rounded = json.loads(_run(*_small(place, work, "--json", *stored)))
    assert (rounded["kv_dtype"], json.loads(straight[1])["kv_dtype"]) == ("int8", "auto")
    both = _answers(work)
    assert len(both) == 2 * len(exact)
    assert exact.items() <= both.items()
    indices = list((work / "indices").glob("*.skv"))
    assert indices
    assert all(read_manifest(one).kv_storage is not None for one in indices)
    assert _rows(_run(*_small(place, work, "--json"))) == _rows(straight[1])
    losses = [
        [row["score"] for row in rows if row["metric"] != "exact"] for rows in (rounded["rows"], _rows(straight[1]))
    ]
    assert losses[0] != losses[1]
    asked = [part for part in _small(place, work, *stored) if part != "-q"]
    assert "keys and values in int8" in run_here(*asked).stdout


def test_few_contexts_are_told_of(place: Path, straight: tuple[Path, str]) -> None:
    """Below the table, for their intervals are too narrow; by answers that are there already."""
    asked = [part for part in _small(place, straight[0]) if part != "-q"]
    told = run_here(*asked).stderr.strip().splitlines()[-1]
    assert "4 questions about 2 contexts are too narrow" in told


def test_every_way_is_told_beside_dense_attention(place: Path, straight: tuple[Path, str]) -> None:
    rows = _rows(straight[1])
    assert [(row["task"], row["method"], row["budget"]) for row in rows] == [
        (task, method, budget)
        for task in ("niah-multikey", "perplexity")
        for method, budget in [
            ("dense", None),
            *((method, budget) for method in ("oracle", "multipole") for budget in (0.05, 1.0)),
        ]
    ]
    for row in rows:
        assert (row["contexts"], row["questions"]) == (2, 4 if row["task"] == "niah-multikey" else 2)
        assert row["score_low"] <= row["score"] <= row["score_high"]
        assert (row["difference"] is None) == (row["method"] == "dense")
        assert row["budget"] is None or row["kv_fraction"] >= row["budget"] * 0.9
    # With the whole document to read, every method is dense attention.
    for row in rows:
        if row["budget"] == 1.0:
            assert row["same_as_dense"] == (None if row["metric"] == "perplexity" else 100)
            assert row["difference"] == pytest.approx(0, abs=1e-3 * max(1, row["score"]))
    assert (place / "x.png").read_bytes().startswith(b"\x89PNG")
    assert len(_answers(straight[0])) == 5 * (4 + 2)
    assert not list((straight[0] / "indices").iterdir())


def test_each_answer_is_written_with_its_score(place: Path, straight: tuple[Path, str], tmp_path: Path) -> None:
    file, rows = tmp_path / "all.jsonl", _rows(straight[1])
    assert _rows(_run(*_small(place, straight[0], "--json", "--answers", file))) == rows
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(records) == sum(row["questions"] for row in rows)
    for row in rows:
        own = [one for one in records if all(one[name] == row[name] for name in ("task", "method", "budget"))]
        assert len(own) == row["questions"]
        assert {one["context"] for one in own} == {one["context"] for one in records if one["task"] == row["task"]}
        if row["task"] == "niah-multikey":
            assert sum(one["score"] for one in own) / len(own) == pytest.approx(row["score"])
            assert all(one["answer"] is not None and one["expected"] for one in own)
        else:
            assert math.exp(sum(math.log(one["score"]) for one in own) / len(own)) == pytest.approx(row["score"])
    _run(*_small(place, straight[0], "--json", "--answers", file))  # its own file is replaced


def test_each_written_answer_names_its_model_and_settings(
    place: Path, straight: tuple[Path, str], tmp_path: Path
) -> None:
    """Files of several runs can be put together."""
    file, runs = tmp_path / "all.jsonl", []
    for question in ((), ("--question-prefill", "quest", "--question-budget", "40"), ("--page-size", "8")):
        way = ("--method", "quest", "--budget", "5%", "--contexts", "1", "--max-new-tokens", "1", *question)
        ask = ("eval", place / "doc.txt", "--model", place / "model", "--work", straight[0], *TASKS[:6], *way, "-q")
        _run(*ask, "--tail", "16", "--answers", file)
        runs.append([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()])
    shared = {"model": str(place / "model"), "document": "doc.txt", "seed": 0, "sinks": 10, "tail": 16}
    shared |= {"weights": "auto", "kv_dtype": "auto", "rope_scaling": None, "batch_size": 1, "prefill": "dense"}
    assert all(shared.items() <= one.items() for run in runs for one in run)
    found = [{tuple(one[name] for name in ("question_prefill", "question_budget")) for one in run} for run in runs]
    assert found == [{("dense", None)}, {("quest", 40)}, {("dense", None)}]
    variants = [{(one["method"], one["variant"]) for one in run} for run in runs]
    assert variants == [{("dense", ""), ("quest", variant)} for variant in ("", "", "page_size=8")]


def test_a_file_that_holds_no_answers_stays(place: Path, straight: tuple[Path, str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"mine": 1}\n', encoding="utf-8")
    outcome = run_here(*_small(place, straight[0], "--answers", mine))
    assert (outcome.code, mine.read_text(encoding="utf-8")) == (1, '{"mine": 1}\n')
    assert "mine.jsonl exists and is not a file of answers of sparsekv; give --answers another name" in outcome.stderr
    outcome = run_here(*_small(place, straight[0], "--answers", tmp_path / "all.json"))
    assert outcome.code == 2
    assert "a file that ends in .jsonl; give" in outcome.stderr


def test_a_second_run_answers_nothing_anew(place: Path, straight: tuple[Path, str]) -> None:
    work, before = straight[0], _answers(straight[0])
    assert _run(*_small(place, work, "--json")) == straight[1]
    as_csv = list(csv.DictReader(io.StringIO(_run(*_small(place, work, "--csv")))))
    assert [float(row["score"]) for row in as_csv] == [row["score"] for row in _rows(straight[1])]
    table = _run(*_small(place, work))
    assert all(word in table for word in ("niah-multikey: 4 questions", "oracle", "100%", "difference to dense [95%]"))
    assert _answers(work) == before


def test_what_is_asked_beside_it_leaves_the_rest_as_it_was(place: Path, straight: tuple[Path, str]) -> None:
    before = _answers(straight[0])
    rows = _rows(_run(*_small(place, straight[0], "--json", "--budget", "7", "--keep-indices")))
    more = _answers(straight[0])
    assert before.items() <= more.items()
    assert len(more) == len(before) + 2 * (4 + 2)
    assert [row for row in rows if row["budget"] != 7] == _rows(straight[1])
    kept = set((straight[0] / "indices").glob("*.skv"))
    assert len(kept) == 4
    _run(*_small(place, straight[0], "--json", "--budget", "9"))
    assert set((straight[0] / "indices").glob("*.skv")) == kept


def test_a_killed_run_goes_on_and_ends_with_the_same_numbers(place: Path, straight: tuple[Path, str]) -> None:
    """Killed between two answers, and again in the middle of writing one."""
    work = place / "killed"
    command = Command(work, _small(place, work, "--json"))
    written = work / "answers.jsonl"
    command.kill_when(lambda: written.exists() and written.read_bytes().count(b"\n") >= 8)
    whole = written.read_bytes()
    assert 8 <= whole.count(b"\n") < 30
    written.write_bytes(whole[:-20])
    assert _rows(_run(*_small(place, work, "--json"))) == _rows(straight[1])
    assert _answers(work).items() <= _answers(straight[0]).items()
    assert written.read_bytes().startswith(whole[: whole.rindex(b"{")])


def test_questions_of_a_context_can_share_a_step(place: Path, straight: tuple[Path, str], tmp_path: Path) -> None:
    """Dense attention's answers are the same ones, and so are those of methods that attend to everything."""
    rows, alone = _rows(_run(*_small(place, tmp_path, "--json", "--batch-size", "2"))), _rows(straight[1])
    for row, of_alone in zip(rows, alone, strict=True):
        if row["budget"] in (None, 1.0):
            assert row["score"] == pytest.approx(of_alone["score"], abs=1e-3)
    found, before = _answers(tmp_path), _answers(straight[0])
    assert len(found) == 5 * (4 + 2)
    assert len(found.keys() & before.keys()) == 5 * 2 + 4  # continuations, and what dense attention answers
    assert all(found[key][0] == before[key][0] for key in found.keys() & before.keys())


def test_answers_of_one_token_take_no_step_and_have_no_kv_fraction(place: Path, tmp_path: Path) -> None:
    how = ("--method", "window", "--contexts", "1", "--questions", "1", "--max-new-tokens", "1")
    one = (*_small(place, tmp_path, *how), "--plot", tmp_path / "x.png")
    rows = _rows(_run(*one, "--json"))
    found = {(row["method"], row["task"]): row["kv_fraction"] for row in rows}
    assert [found[name, "niah-multikey"] for name in ("dense", "oracle", "window")] == [1, None, None]
    assert [found[name, "perplexity"] for name in ("dense", "oracle", "window")] == [1, 1, 0]
    assert _run(*one, "--html", tmp_path / "x.html")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_kept_index_of_another_sample_is_not_that_of_these_methods(place: Path, tmp_path: Path) -> None:
    """Methods learn of as many queries as the greediest beside them wants, and an answer's key says of how many."""
    task = ("--task", "niah-multikey", "--length", "500", "--contexts", "2", "--questions", "1")
    some = (*task, "--sinks", "4", "--tail", "16", "-q", "--max-new-tokens", "4", "--budget", "5%", "--keep-indices")
    ask = ("eval", place / "doc.txt", "--model", place / "model", "--work", tmp_path, *some, "--method", "codes")
    kept = []
    for beside in ((), ("--method", "multipole"), ("--method", "csattention")):
        _run(*ask, *beside)
        kept.append(len(list((tmp_path / "indices").glob("*.skv"))))
    assert kept == [2, 2, 4]


@pytest.mark.slow
def test_where_questions_share_steps_a_run_goes_on_with_the_same_answers(place: Path, tmp_path: Path) -> None:
    """An answer depends on the questions beside it, so that these are asked again with it, and are part of its key."""
    three = ("--batch-size", "3", "--questions", "3", "--method", "window", "--method", "csattention")
    first = _run(*_small(place, tmp_path / "a", "--json", *three))
    whole, written = _answers(tmp_path / "a"), tmp_path / "a" / "answers.jsonl"
    written.write_text("".join(written.read_text(encoding="utf-8").splitlines(keepends=True)[::2]), encoding="utf-8")
    assert len(_answers(tmp_path / "a")) == len(whole) // 2
    assert _rows(_run(*_small(place, tmp_path / "a", "--json", *three))) == _rows(first)
    assert _answers(tmp_path / "a") == whole
    fewer = _run(*_small(place, tmp_path / "b", "--json", *three, "--questions", "2"))
    assert _rows(_run(*_small(place, tmp_path / "a", "--json", *three, "--questions", "2"))) == _rows(fewer)
    assert _answers(tmp_path / "b").items() <= _answers(tmp_path / "a").items()


def test_a_full_disk_is_told_with_evals_remedies(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    outcome = run_here(*_small(place, tmp_path))
    assert outcome.code == 1
    assert outcome.stderr.endswith(
        " free; make room, or choose another folder with --work, or give a smaller --length\n"
    )


def test_prefills_are_compared_on_the_same_contexts(place: Path, tmp_path: Path) -> None:
    command = (
        "eval",
        place / "doc.txt",
        "--model",
        place / "model",
        "--work",
        tmp_path / "work",
        "--task",
        "perplexity",
    )
    sizes = ("--length", "500", "--contexts", "2", "--sinks", "4", "--tail", "16", "--chunk-size", "64")
    prefills = ("--prefill", "dense", "--prefill", "quoka", "--prefill-budget", "64", "--method", "dense")
    dense, sparse = _rows(_run(*command, *sizes, *prefills, "--json", "-q"))
    assert (dense["prefill"], sparse["prefill"], dense["difference"]) == ("dense", "quoka", None)
    assert sparse["difference"] == pytest.approx(sparse["score"] - dense["score"])
    assert sparse["difference"] != 0


def test_a_questions_own_prefill_changes_answers_but_not_dense_attentions(
    place: Path, straight: tuple[Path, str]
) -> None:
    before = _answers(straight[0])
    _run(*_small(place, straight[0], "--question-prefill", "dense", "--json"))
    assert _answers(straight[0]) == before
    _run(*_small(place, straight[0], "--question-prefill", "quoka", "--question-budget", "32", "--json"))
    more = _answers(straight[0])
    # two methods at two budgets, four questions and two continuations; dense attention answered them before
    assert len(more) == len(before) + 4 * (4 + 2)
    assert before.items() <= more.items()
    _run(*_small(place, straight[0], "--question-prefill", "own", "--json"))
    assert len(_answers(straight[0])) == len(more) + 4 * (4 + 2)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    text = DOCUMENT
    records = [
        {"context": text[:40_000], "questions": ["What is an assert?", "What is a name?"], "answers": ["d", ["b", "c"]]}
    ]
    path = tmp_path / "published.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def test_published_data_is_cut_to_what_the_model_can_take(place: Path, tmp_path: Path, published: Path) -> None:
    command = (
        "eval",
        "--data",
        published,
        "--format",
        "prefixqa",
        "--model",
        place / "model",
        "--work",
        tmp_path / "w",
    )
    rows = _rows(_run(*command, "--method", "quest", "--budget", "5%", "--max-new-tokens", "4", "--json", "-q"))
    assert [(row["task"], row["metric"], row["questions"]) for row in rows] == [("prefixqa", "f1", 2)] * 2


def test_a_needle_is_not_cut_out(place: Path, tmp_path: Path) -> None:
    """No method could find it, and a figure would say that all of them had lost it."""
    needle = {"needle": "Eat a sandwich.", "retrieval_question": "What to eat?"}
    records = [needle | {"context": DOCUMENT[:at] + " Eat a sandwich. " + DOCUMENT[at:40_000]} for at in (100, 195)]
    records.append(records[1] | {"answer": "E"})  # the cut is behind the beginning of the needle
    commands = []
    for number, record in enumerate(records):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(record), encoding="utf-8")
        given = ("--data", path, "--format", "niah", "--model", place / "model", "--work", tmp_path / f"w{number}")
        commands.append(
            ("eval", *given, "--method", "quest", "--length", "400", "--max-new-tokens", "4", "--json", "-q")
        )
    assert {row["questions"] for row in _rows(_run(*commands[0]))} == {1}
    for command in commands[1:]:
        refused = run_here(*command)
        assert refused.code == 2
        assert "which removes the answer to its question" in refused.stderr
        assert "give --length" in refused.stderr


def test_a_kept_index_is_not_used_with_other_sinks(place: Path, tmp_path: Path) -> None:
    for sinks in ("4", "8"):
        few = ("--contexts", "1", "--questions", "1", "--keep-indices", "--sinks", sinks)
        _run(*_small(place, tmp_path / "work", *few))
    kept = {read_manifest(path).split.sinks for path in (tmp_path / "work").rglob("*.skv")}
    assert kept == {4, 8}


def test_contexts_longer_than_the_models_positions_are_asked_about_with_a_scaled_rope(
    place: Path, tmp_path: Path
) -> None:
    config = json.loads((place / "model" / "config.json").read_text(encoding="utf-8"))
    short = shutil.copytree(place / "model", tmp_path / "model")
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 400}), encoding="utf-8")
    command = [short if part == place / "model" else part for part in _small(place, tmp_path / "work", "--json")]
    refused = run_here(*command)
    assert refused.code == 2
    assert "give a smaller --length, or stretch the model with --rope-scaling yarn:2" in refused.stderr
    refused = run_here(*command, "--rope-scaling", "dynamic:1.1")
    assert "or stretch the model with --rope-scaling dynamic:2" in refused.stderr
    stretched = _rows(_run(*command, "--rope-scaling", "yarn:2"))
    assert all(row["tokens"] > 400 for row in stretched if row["task"] == "niah-multikey")
    by_other = _rows(_run(*command, "--rope-scaling", "dynamic:2"))  # in the same folder, of which it takes nothing
    assert [row["score"] for row in by_other] != [row["score"] for row in stretched]


def test_options_of_a_method_and_of_its_index_are_named(place: Path, tmp_path: Path) -> None:
    ways = ("--method", "multipole", "--method", "quest", "--page-size", "8", "--levels", "0.2", "--residual")
    small = ("--length", "500", "--contexts", "1", "--questions", "1", "--max-new-tokens", "1", "--budget", "5%")
    asked = ("eval", place / "doc.txt", "--model", place / "model", "--work", tmp_path, *small, *ways, "-q")
    named = {("dense", ""), ("quest", "page_size=8"), ("quest", "page_size=8 + residual")}
    named |= {("multipole", "levels=0.2")}  # which represents unselected tokens without a residual
    found = json.loads(_run(*asked, "--json"))
    assert {(row["method"], row["variant"]) for row in found["rows"]} == named
    assert {(cell["method"], cell["variant"]) for cell in found["depths"]} == named
    assert "quest page_size=8 + residual" in _run(*asked)
