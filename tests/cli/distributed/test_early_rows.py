"""While ranks prefill a document, each writes the rows of its KV heads, and a build that ends meanwhile is resumed."""

import time
from pathlib import Path

import psutil
import pytest
from support.started_ranks import BUILD, LONG, early_heads, start_ranks, started

from sparsekv.formats.index.reader import Artifact

SLOWLY = ("--chunk-size", "16")


@pytest.fixture
def new(place: Path) -> Path:
    """Where an index of a longer document is built."""
    (place / "doc.txt").write_text(LONG)
    return place / "new.skv"


def _assert_built(new: Path) -> None:
    running = start_ranks(*BUILD)
    stdout, stderr = running.communicate(timeout=300)
    assert (running.returncode, stdout, stderr) == (0, "new.skv\n", "")
    index = Artifact(new)
    assert len(list(index.verify())) == len(index.manifest.files)
    assert not list(new.rglob("*.tmp"))


@pytest.mark.slow
def test_both_ranks_write_their_heads_before_the_last_rows_are_there(new: Path) -> None:
    running = start_ranks(*BUILD, *SLOWLY)
    while early_heads(new) != {0, 1}:
        assert running.poll() is None
        time.sleep(0.005)
    assert running.communicate(timeout=300) == ("new.skv\n", "")
    index = Artifact(new)
    assert len(list(index.verify())) == len(index.manifest.files)


@pytest.mark.slow
def test_ranks_write_the_one_file_that_is_damaged_and_keep_the_others(new: Path) -> None:
    _assert_built(new)
    files = sorted(new.glob("context/*"))
    before = {path.name: path.stat().st_ino for path in files}
    with files[1].open("r+b") as damaged:
        damaged.write(bytes(8))
    _assert_built(new)
    kept = {path.name: path.stat().st_ino for path in new.glob("context/*")}
    assert len(kept) == len(before)
    assert kept.items() & before.items() == before.items() - {(files[1].name, before[files[1].name])}


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_killed_while_all_write_leaves_a_build_to_resume(new: Path, number: int) -> None:
    running = start_ranks(*BUILD, *SLOWLY)
    ranks = started(running, new)
    while early_heads(new) != {0, 1}:
        assert running.poll() is None
        time.sleep(0.005)
    ranks[number].kill()
    stdout, stderr = running.communicate(timeout=60)
    assert (running.returncode, stdout) == (1, "")
    assert stderr.startswith(f"sparsekv: error: rank {number} of 2 was killed (SIGKILL)")
    _assert_built(new)


@pytest.mark.slow
def test_what_the_second_rank_cannot_write_is_told_once(new: Path) -> None:
    running = start_ranks(*BUILD, *SLOWLY)
    started(running, new)[1].rlimit(psutil.RLIMIT_FSIZE, (1 << 14, 1 << 14))
    stdout, stderr = running.communicate(timeout=60)
    assert (running.returncode, stdout) == (1, "")
    assert stderr == (
        "sparsekv: error: cannot write new.skv: file too large; free space or get permission there, or choose another "
        "folder with --output, and run the same command again\n"
    )
    _assert_built(new)
