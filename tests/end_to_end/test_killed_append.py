"""`kill -9` at random moments of an append: the index is always the old one or the new one, whole."""

import json
import random
import shutil
from pathlib import Path

import pytest
from support.artifacts import assert_no_strays
from support.command import run_here
from support.killed import Command

from sparsekv.formats.index.reader import Artifact

FIRST, MORE = 6_000, 3_000  # characters


def _append(folder: Path, document: Path) -> Command:
    return Command(folder, ("append", document, "-i", folder, "-q"))


def _sums(folder: Path) -> dict[str, str]:
    return {name: record.sha256 for name, record in Artifact(folder).manifest.files.items()}


def _assert_valid(folder: Path) -> None:
    """By the two commands that people have for it."""
    verified = run_here("inspect", "-i", folder, "--verify", "--json")
    assert verified.code == 0, verified.stderr
    assert json.loads(verified.stdout)["verified"]
    answered = run_here(
        "generate", "What is this about?", "-i", folder, "--method", "multipole", "--max-new-tokens", "2", "-q"
    )
    assert answered.code == 0, answered.stderr
    assert answered.stdout.strip()


@pytest.mark.slow
def test_ten_killed_appends(embedded_folder: Path, document: Path, tmp_path: Path) -> None:
    """Each index is then answered from, and finished."""
    text, base, more = document.read_text(encoding="utf-8"), tmp_path / "base.skv", tmp_path / "more.txt"
    (tmp_path / "first.txt").write_text(text[:FIRST], encoding="utf-8")
    more.write_text(text[FIRST : FIRST + MORE], encoding="utf-8")
    built = run_here("build-index", tmp_path / "first.txt", "-o", base, "--method", "multipole", "-q")
    assert built.code == 0, built.stderr
    straight = _append(tmp_path / "straight.skv", more)
    shutil.copytree(base, straight.folder)
    seconds = straight.run()
    old, new = _sums(base), _sums(straight.folder)
    moments, unfinished = random.Random(0), 0
    for number in range(10):
        append = _append(tmp_path / f"{number}.skv", more)
        shutil.copytree(base, append.folder)
        append.kill_after(moments.uniform(0, seconds))
        assert _sums(append.folder) in (old, new)
        unfinished += (append.folder / "unfinished.json").exists()
        _assert_valid(append.folder)
        if _sums(append.folder) == old:
            append.run()
        assert _sums(append.folder) == new
        assert_no_strays(append.folder)
        shutil.rmtree(append.folder)
    assert unfinished, "no kill hit the middle of the writing"
