"""`generate --stats` names time that an answer took once, and the dtype and layers of the kv fraction."""

import json
import subprocess
from pathlib import Path

import pytest
from support.command import EXECUTABLE, environment, run_here
from support.tiny_models import WINDOW, save_tiny

from sparsekv.formats.index.reader import Artifact

TOLD = "compiled kernels for this CPU"


@pytest.mark.slow
def test_the_first_answer_on_a_machine_says_that_kernels_were_compiled_in_it(place: Path) -> None:
    """By processes of their own: numba reads where to keep them when it is imported."""
    ask = "generate", "Why?", "-i", "doc.skv", "--method", "squeezed", "--budget", "50%", "--max-new-tokens", "4"
    kept, said = environment() | {"NUMBA_CACHE_DIR": str(place / "compiled")}, []
    for _ in range(2):
        command = [str(EXECUTABLE), *ask, "--stats"]
        done = subprocess.run(command, cwd=place, env=kept, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "first token after" in done.stderr
        said.append(TOLD in done.stderr)
    assert said == [True, False]


@pytest.mark.usefixtures("place")
def test_what_was_asked_for_is_told_even_where_nothing_else_is() -> None:
    quiet = run_here("generate", "Why?", "--max-new-tokens", "2", "--stats", "-q").stderr
    assert "first token after" in quiet
    assert "index opened in" in quiet
    assert run_here("generate", "Why?", "--max-new-tokens", "2", "-q").stderr == ""


def test_what_a_kv_fraction_is_of_is_told(place: Path) -> None:
    """By answers and by a report: the dtype, and for a model with windows its share of what all layers read."""
    assert "keys and values in float32\n" in run_here("generate", "Why?", "--max-new-tokens", "2", "--stats").stderr
    assert "keys and values in float32." in " ".join(run_here("recall-report", "--budget", "10%").stdout.split())
    save_tiny(place / "windows", "gemma3")
    assert (
        run_here("build-index", "doc.txt", "-o", "windows.skv", "--model", "windows", "--max-tokens", "300").code == 0
    )
    split = Artifact(place / "windows.skv").manifest.split
    assert split.tokens > WINDOW
    over_all = (0.1 * split.middle + WINDOW) / (split.middle + WINDOW)
    for command in (("generate", "Why?", "--max-new-tokens", "2", "--stats"), ("recall-report", "--budget", "10%")):
        done = run_here(*command, "-i", "windows.skv")
        told = " ".join((done.stdout + done.stderr).split())
        assert "the 2 layers that attend to the whole document. The other 2 layers" in told
        assert f"With these layers counted, a kv fraction of 0.1 is {over_all:.2f}." in told


@pytest.mark.usefixtures("place")
def test_an_answer_of_one_token_takes_no_step_and_so_reads_no_share() -> None:
    """Alone, in a batch, and for a blank line; dense attention reads everything in any case."""
    Path("questions.txt").write_text("Why?\n\nHow?\n")
    one = ("generate", "--max-new-tokens", "1", "--json", "-q")
    several = ("--batch-file", "questions.txt")
    for asked, method, expected in (
        (("Why?",), "squeezed", [None]),
        (("Why?",), "dense", [1]),
        (several, "squeezed", [None, None, None]),
        ((*several, "--batch-size", "1"), "squeezed", [None, None, None]),
        (several, "dense", [1, None, 1]),
    ):
        found = run_here(*one, *asked, "--method", method).stdout.splitlines()
        assert [json.loads(line)["kv_fraction"] for line in found] == expected


def test_a_kv_fraction_over_int8_rows_is_counted_in_the_dtype_of_the_index(place: Path) -> None:
    """In which codes and lists are a smaller share than beside int8 rows."""
    assert run_here("convert", "doc.skv", "-o", "int8.skv", "-q").code == 0
    report = ("recall-report", "--method", "squeezed", "--budget", "10%")
    exact, rounded = (json.loads(run_here(*report, "-i", one, "--json").stdout) for one in ("doc.skv", "int8.skv"))
    assert rounded["rows"][0]["kv_fraction"] == pytest.approx(exact["rows"][0]["kv_fraction"], rel=0.1)
    told = "keys and values in float32 (stored in int8)"
    assert told in " ".join(run_here(*report, "-i", "int8.skv").stdout.split())
    assert told in run_here("generate", "Why?", "--max-new-tokens", "2", "--stats", "-i", "int8.skv").stderr


@pytest.mark.usefixtures("place")
def test_a_share_that_questions_read_together_is_told_as_that_of_their_steps() -> None:
    Path("questions.txt").write_text("Why?\nHow?\nWhat?\n")
    ask = ("generate", "--batch-file", "questions.txt", "--max-new-tokens", "2", "--stats", "-q")
    together = run_here(*ask, "--batch-size", "2").stderr
    assert together.count(", its steps, each of up to 2 questions, read ") == 3
    alone = run_here(*ask, "--batch-size", "1").stderr
    assert "its steps" not in alone
    assert alone.count(" a second, read ") == 3


def test_a_model_in_another_dtype_than_the_index_is_told(place: Path) -> None:
    ask = ("generate", "Why?", "--max-new-tokens", "1", "--stats")
    told = run_here(*ask, "--dtype", "float16").stderr
    assert "keys and values in float32; the model computes in float16\n" in told
    assert "computes in" not in run_here(*ask).stderr
