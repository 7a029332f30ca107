"""A rank that fails at its share of sums or layers: all end with one line, and the same command finishes the index."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import environment
from support.started_ranks import BUILD, start_ranks

from sparsekv.formats.index.reader import Artifact

SUM = "sparsekv.formats.index.reader:WholeFile.sha256"
OWN_SUM = "sparsekv.formats.index.growing_file:hash_descriptor"
LAYER = "sparsekv.indexing.capture.team:LayerWork.build"
MOMENTS = {
    "the-first-sums": (0, OWN_SUM),
    "the-first-is-told-a-sum": (0, "sparsekv.formats.distributed.group:Channel.receive"),
    "the-first-makes-a-layer": (0, LAYER),
    "the-first-takes-a-layer": (0, "sparsekv.formats.distributed.group:Ranks.take"),
    "the-second-sums": (1, SUM),
    "the-second-tells-a-sum": (1, "sparsekv.formats.distributed.group:Channel.send"),
    "the-second-opens-files": (1, "sparsekv.indexing.distributed.requests:find_whole"),
    "the-second-makes-a-layer": (1, LAYER),
    "the-second-gives-a-layer": (1, "sparsekv.formats.distributed.group:Ranks.give"),
}
"""When a rank fails: its number, and the function that it has come to."""


def _build(place: Path, number: int, where: str, how: str, *more: str) -> "subprocess.CompletedProcess[str]":
    """Build by two ranks, of which one fails, or waits."""
    python, tests = place / "python", Path(__file__).parents[2]
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH={tests} exec {sys.executable} -m support.failing_rank {number} {where} {how} "$@"\n'
    )
    python.chmod(0o755)
    start = f"import sys; sys.executable = {str(python)!r}; from sparsekv.cli.main import main; main()"
    command = [sys.executable, "-c", start, "--gpus", "2", *BUILD, *more]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)


def _assert_whole(index: Path) -> None:
    artifact = Artifact(index)
    assert len(list(artifact.verify())) == len(artifact.manifest.files)
    assert not list(index.rglob("*.tmp"))
    assert not (index / "unfinished.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_is_killed_leaves_a_build_to_finish(place: Path, moment: str) -> None:
    number, where = MOMENTS[moment]
    done = _build(place, number, where, "killed")
    assert (done.returncode, done.stdout) == (1, "")
    told = f"sparsekv: error: rank {number} of 2 was killed ({signal.SIGKILL.name}), and the other ranks were stopped"
    assert done.stderr.startswith(told)
    again = start_ranks(*BUILD)
    assert (*again.communicate(timeout=300), again.returncode) == ("new.skv\n", "", 0)
    _assert_whole(place / "new.skv")


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_layer_that_one_rank_cannot_make_ends_both_with_one_line(place: Path, number: int) -> None:
    done = _build(place, number, LAYER, "refused")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "sparsekv: error: this layer cannot be indexed; try another\n"


@pytest.mark.slow
def test_a_sum_that_the_second_rank_cannot_make_is_made_by_the_first(place: Path) -> None:
    done = _build(place, 1, SUM, "unreadable")
    assert (done.returncode, done.stdout, done.stderr) == (0, "new.skv\n", "")
    _assert_whole(place / "new.skv")


@pytest.mark.slow
def test_a_sum_that_the_first_rank_cannot_make_ends_both_with_one_line(place: Path) -> None:
    done = _build(place, 0, OWN_SUM, "unreadable")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("sparsekv: error: cannot write new.skv: input/output error; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "more"),
    [
        ("sparsekv.indexing.methods.squeezed:SqueezedIndexer.calibrate", ()),
        (LAYER, ("--kv-dtype", "int8")),
    ],
    ids=["after-its-last-layer", "where-it-makes-none"],
)
def test_the_second_rank_does_not_wait_for_what_the_first_does_alone(
    place: Path, where: str, more: tuple[str, ...]
) -> None:
    """It would give up after half an hour, which a calibration or a disk may take."""
    done = _build(place, 0, where, "left_alone", *more)
    assert (done.returncode, done.stdout, done.stderr) == (0, "new.skv\n", "")
    _assert_whole(place / "new.skv")
