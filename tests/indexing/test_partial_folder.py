"""Folders that are made under another name: when they appear, and what is left of a process that was killed."""

import errno
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from sparsekv.indexing.append import cannot_write, partial_folder


def _wait_within(folder: Path, told: Connection) -> None:
    with partial_folder(folder) as unfinished:
        (unfinished / "context").mkdir()
        (unfinished / "context" / "layer").write_text("half")
        told.send(unfinished)
        told.recv()


@contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """The partial folder of a process that waits in the middle, and is killed (-9) at the end of the context."""
    fork = multiprocessing.get_context("fork")  # a process that imported anew would take seconds
    here, there = fork.Pipe()
    process = fork.Process(target=_wait_within, args=(folder, there), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


def _write(folder: Path) -> None:
    with partial_folder(folder) as unfinished:
        (unfinished / "data").write_text("whole")


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_it_takes_its_name_at_the_end_and_holds_nothing_else(tmp_path: Path) -> None:
    with partial_folder(tmp_path / "new" / "a.skv") as unfinished:
        (unfinished / "data").write_text("whole")
        assert _names(tmp_path / "new") == {unfinished.name}
    assert _names(tmp_path / "new") == {"a.skv"}
    assert _names(tmp_path / "new" / "a.skv") == {"data"}


def test_a_killed_process_leaves_what_the_next_one_removes_and_a_living_one_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a.skv"
    with _writing(folder) as dead:
        pass
    assert (dead / "context" / "layer").exists()
    with _writing(folder) as alive:
        _write(folder)
        assert _names(tmp_path) == {"a.skv", alive.name}
        assert (alive / "context" / "layer").read_text() == "half"
    _write(tmp_path / "b.skv")
    assert _names(tmp_path) == {"a.skv", "b.skv", alive.name}
    with pytest.raises(OSError, match="not empty"):
        _write(folder)
    assert _names(tmp_path) == {"a.skv", "b.skv"}


def test_two_in_one_process_do_not_take_each_other_for_dead(tmp_path: Path) -> None:
    with partial_folder(tmp_path / "a.skv") as first:
        _write(tmp_path / "a.skv")
        assert first.exists()
        (tmp_path / "a.skv").rename(tmp_path / "b.skv")
    assert _names(tmp_path) == {"a.skv", "b.skv"}


def test_what_is_no_partial_folder_is_left_alone(tmp_path: Path) -> None:
    """Other names, a file, a link, and a folder that holds things but no lock; an empty one has nothing to lose."""
    names = ("b.skv.01234567.partial", "a.skv.notes.partial", "a.skv.0123456789.partial", "a.skv.00000000.partial")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text("mine")
    (tmp_path / "a.skv.11111111.partial").write_text("mine")
    (tmp_path / "a.skv.22222222.partial").symlink_to(tmp_path / names[0])
    (tmp_path / "a.skv.33333333.partial").mkdir()
    _write(tmp_path / "a.skv")
    assert _names(tmp_path) == {"a.skv", *names, "a.skv.11111111.partial", "a.skv.22222222.partial"}


def test_a_name_that_was_taken_meanwhile_is_not_mended_by_more_room(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not empty") as caught, partial_folder(tmp_path / "a.skv"):
        _write(tmp_path / "a.skv")
    told = str(cannot_write(tmp_path / "a.skv", caught.value))
    assert told.endswith("choose another name")
    assert str(cannot_write(tmp_path / "a.skv", OSError(errno.ENOSPC, "No space"))).endswith("or make room there")
