"""The command in shell pipelines, as people use it."""

import csv
import io
import json
from pathlib import Path

import pytest
from support.command import shell, sparsekv

from sparsekv.formats.index.reader import Artifact


@pytest.mark.slow
def test_build_and_ask_in_one_line(embedded_folder: Path, document: Path, tmp_path: Path) -> None:
    (tmp_path / "doc.txt").write_text(document.read_text()[:1000])
    done = shell(
        'A=$(sparsekv build-index doc.txt) && echo "What is this about?" | '
        'sparsekv generate --index "$A" --max-new-tokens 8 | head -3',
        tmp_path,
    )
    assert done.returncode in (0, 141), done.stderr  # 141: head had enough before the answer ended
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
    assert (tmp_path / "doc.skv" / "manifest.json").exists()


def test_json_goes_through_json_tool_and_head_leaves_no_traceback(index: Artifact) -> None:
    report = f"sparsekv recall-report --index {index.folder} --budget 64 --method quest --by layer"
    piped = shell(
        f"{report} --json | python3 -m json.tool > by-layer.json && {report} --csv | head -1", index.folder.parent
    )
    assert piped.returncode in (0, 141), piped.stderr
    assert piped.stdout.startswith("method,variant,budget,")
    assert piped.stderr == ""
    rows = json.loads((index.folder.parent / "by-layer.json").read_text())["rows"]
    assert len(rows) == 1 + len(index.manifest.indexed_layers)
    assert {row["budget_tokens"] for row in rows} == {64}


def test_a_batch_gives_one_line_an_answer(index: Artifact) -> None:
    folder = index.folder.parent
    (folder / "questions.txt").write_text("What is an assignment?\n\nWhat is a target?\n")
    plain = sparsekv(
        "generate", "-i", index.folder, "--batch-file", "questions.txt", "--max-new-tokens", "4", "-q", cwd=folder
    )
    assert plain.returncode == 0, plain.stderr
    first, blank, second = plain.stdout.splitlines()
    assert first
    assert second
    assert blank == ""
    assert plain.stderr == ""
    done = sparsekv(
        *("generate", "-i", index.folder, "--batch-file", "-", "--json", "--max-new-tokens", "4"),
        cwd=folder,
        stdin="What is an assignment?\nWhat is a target?\n",
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [" ".join(answer["text"].split()) for answer in answers] == [first, second]
    expected = {"text", "prompt_tokens", "generated_tokens", "method", "budget", "tokens_per_second", "kv_fraction"}
    assert all(expected <= answer.keys() for answer in answers)


def test_question_from_argument_file_and_stdin_agree(index: Artifact) -> None:
    folder, options = index.folder.parent, ("--max-new-tokens", "4", "--budget", "0.2")
    (folder / "question.txt").write_text("What is an assignment?\n")
    asked = [
        sparsekv("generate", "-i", index.folder, "What is an assignment?", *options, cwd=folder),
        sparsekv("generate", "-i", index.folder, "--prompt-file", "question.txt", *options, cwd=folder),
        sparsekv("generate", "-i", index.folder, *options, cwd=folder, stdin="What is an assignment?\n"),
    ]
    assert asked[0].stdout.strip()
    assert [one.stdout for one in asked] == [asked[0].stdout] * 3


def test_questions_of_a_person_are_measured(index: Artifact) -> None:
    done = sparsekv(
        *("recall-report", "-i", index.folder, "--queries", "-", "--csv", "--budget", "0.1", "--plot", "plot.png"),
        *("--method", "oracle", "--method", "squeezed", "--method", "window"),
        cwd=index.folder.parent,
        stdin="What is an assignment?\nWhat is a target list?\n",
    )
    assert done.returncode == 0, done.stderr
    rows = {row["method"] + row["variant"]: row for row in csv.DictReader(io.StringIO(done.stdout))}
    assert float(rows["oracle"]["recall"]) == 1
    assert float(rows["squeezedflat"]["recall"]) > float(rows["window"]["recall"]) == 0
    assert (index.folder.parent / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_inspect_shows_what_is_there(index: Artifact) -> None:
    folder = index.folder.parent
    done = sparsekv("inspect", "-i", index.folder, "--verify", "--plot", "sizes.png", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    squeezed = shown["methods"]["squeezed"]
    finest = [row for row in squeezed["layers"] if row["level"] == 0]
    assert shown["verified"]
    assert sum(shown["bytes"].values()) == sum(record.bytes for record in index.manifest.files.values())
    assert len(finest) == len(index.manifest.indexed_layers)
    assert all(0 < row["min"] <= row["median"] <= row["p99"] <= row["max"] for row in finest)
    assert sum(sum(cluster["words"].values()) for cluster in squeezed["biggest"]) == sum(
        cluster["tokens"] for cluster in squeezed["biggest"]
    )
    assert (folder / "sizes.png").read_bytes().startswith(b"\x89PNG")
    table = sparsekv("inspect", "-i", index.folder, "--method", "all", cwd=folder)
    assert table.returncode == 0, table.stderr
    assert "biggest clusters of layer 15" in table.stdout, table.stdout


def test_the_only_index_of_a_folder_needs_no_name(index: Artifact, tmp_path: Path) -> None:
    (tmp_path / "only.skv").symlink_to(index.folder)
    done = sparsekv("recall-report", "--method", "window", "--budget", "1", "--csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
