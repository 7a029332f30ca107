"""If a folder cannot be written, the error is one clear line and nothing is lost."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.artifacts import (
    CONTEXT,
    METHOD,
    QUERIES,
    assert_holds,
    assert_no_strays,
    files_in,
    small_artifact,
    small_files,
    small_recipe,
)

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.folder import LOCK, MARKER
from sparsekv.formats.index.manifest import JOURNAL
from sparsekv.formats.index.schema import MANIFEST
from sparsekv.formats.index.writer import ArtifactWriter


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """Expect an ArtifactError of one line with all of these words in it."""
    with pytest.raises(ArtifactError) as error:
        yield
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing past `size` bytes fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def takes_over(folder: Path) -> bool:
    with ArtifactWriter(folder) as writer:
        return writer.reuse(CONTEXT, small_recipe(CONTEXT, 0, 0))


@pytest.mark.parametrize("size", [0, 100, 1500, 2500])
def test_a_disk_that_fills_up_stops_a_first_build(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "some.skv"
    with largest_file(size), refused("cannot write", str(folder), "--output", "run the same command again"):
        small_artifact(folder)
    assert not any(name.endswith(".tmp") for name in files_in(folder))
    small_artifact(folder)
    assert_holds(folder)
    assert_no_strays(folder)


@pytest.mark.parametrize("size", [0, 100, 1500, 2500])
def test_a_disk_that_fills_up_leaves_the_finished_index_valid(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "some.skv"
    small_artifact(folder)
    with largest_file(size), refused("cannot write", str(folder)):
        small_artifact(folder, context=1, method=1)
    assert not any(name.endswith(".tmp") for name in files_in(folder))
    assert_holds(folder)
    small_artifact(folder, context=1, method=1)
    assert_holds(folder, context=1, method=1)
    assert_no_strays(folder)


@pytest.mark.parametrize("place", ["file", "file/some.skv", "/proc/some.skv"])
def test_a_place_where_no_folder_can_be(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("something else")
    with refused("cannot write", str(tmp_path / place), "--output"):
        small_artifact(tmp_path / place)
    assert (tmp_path / "file").read_text() == "something else"


def test_a_file_where_a_subfolder_should_be(tmp_path: Path) -> None:
    folder = tmp_path / "some.skv"
    with refused("cannot write", str(folder)), ArtifactWriter(folder) as writer:
        (folder / CONTEXT).parent.write_text("something else")
        writer.write(CONTEXT, small_files()[CONTEXT], small_recipe(CONTEXT, 0, 0))


def test_what_could_not_be_written_stops_the_build_and_loses_nothing_else(tmp_path: Path) -> None:
    folder, files = tmp_path / "some.skv", small_files()
    with refused("cannot write", str(folder)), ArtifactWriter(folder) as writer:
        (folder / CONTEXT).parent.write_text("something else")
        writer.write(METHOD, files[METHOD], small_recipe(METHOD, 0, 0))
        writer.write(CONTEXT, files[CONTEXT], small_recipe(CONTEXT, 0, 0))
        with refused("cannot write", str(folder)):
            writer.record(CONTEXT)
        writer.write(QUERIES, files[QUERIES], small_recipe(QUERIES, 0, 0))
    with ArtifactWriter(folder) as writer:
        assert writer.reuse(METHOD, small_recipe(METHOD, 0, 0))
        assert not writer.reuse(QUERIES, small_recipe(QUERIES, 0, 0))


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["model.safetensors", "notes.txt", "weights/model.safetensors"])
def test_a_folder_of_other_things_is_left_alone(tmp_path: Path, name: str, force: bool) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    with refused(str(tmp_path), name.split("/")[0], "--output"):
        small_artifact(tmp_path, force=force)
    assert files_in(tmp_path) == {name}
    assert not (tmp_path / LOCK).exists()


def test_an_empty_folder_may_become_an_index(tmp_path: Path) -> None:
    small_artifact(tmp_path)
    assert_holds(tmp_path)


def test_one_build_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "some.skv"
    with ArtifactWriter(folder):
        with refused(str(folder), "is being built by another process"):
            small_artifact(folder)
        with refused(str(folder), "is being built by another process"):
            small_artifact(folder, force=True)
    small_artifact(folder)
    assert_holds(folder)


def test_a_build_that_wrote_nothing_leaves_no_folder(tmp_path: Path) -> None:
    with suppress(ZeroDivisionError), ArtifactWriter(tmp_path / "new" / "some.skv"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 10])
def test_a_disk_without_room_for_the_marker_leaves_no_folder(tmp_path: Path, size: int) -> None:
    with largest_file(size), refused("cannot write"):
        small_artifact(tmp_path / "new" / "some.skv")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_begun_goes_with_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "some.skv"
    with suppress(ZeroDivisionError), ArtifactWriter(folder) as writer:
        writer.share_rows(CONTEXT, small_recipe(CONTEXT, 0, 0))
        raise ZeroDivisionError
    assert not folder.exists()


def test_a_folder_that_was_there_stays_and_is_no_unfinished_index(tmp_path: Path) -> None:
    with suppress(ZeroDivisionError), ArtifactWriter(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_what_another_program_writes_meanwhile_stays(tmp_path: Path) -> None:
    folder = tmp_path / "some.skv"
    with suppress(ZeroDivisionError), ArtifactWriter(folder):
        (folder / "notes.txt").write_text("precious")
        raise ZeroDivisionError
    assert (folder / "notes.txt").read_text() == "precious"


def test_a_build_that_is_refused_for_the_lock_leaves_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "some.skv"
    with ArtifactWriter(folder) as first:
        with refused("is being built by another process"), ArtifactWriter(folder):
            pass
        first.write(CONTEXT, small_files()[CONTEXT], small_recipe(CONTEXT, 0, 0))
    assert takes_over(folder)


def test_the_marker_goes_after_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that begins in between would else take the folder for that of another program."""
    gone, unlink = list[str](), os.unlink

    def noted(name: str, *, dir_fd: int | None = None) -> None:
        gone.append(name)
        unlink(name, dir_fd=dir_fd)

    with suppress(ZeroDivisionError), ArtifactWriter(tmp_path / "some.skv") as writer:
        writer.share_rows(CONTEXT, small_recipe(CONTEXT, 0, 0))
        monkeypatch.setattr(os, "unlink", noted)
        raise ZeroDivisionError
    assert gone.index(JOURNAL) < gone.index(MARKER)


def test_a_build_that_begins_while_the_folder_goes_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the lock file is gone, another build gets the lock of a new one."""
    folder, rmdir, others = tmp_path / "some.skv", Path.rmdir, list[ArtifactWriter]()

    def another_begins(path: Path) -> None:
        others.append(ArtifactWriter(folder).__enter__())
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", another_begins)
    with suppress(ZeroDivisionError), ArtifactWriter(folder):
        raise ZeroDivisionError
    monkeypatch.undo()
    (other,) = others
    other.write(CONTEXT, small_files()[CONTEXT], small_recipe(CONTEXT, 0, 0))
    other.__exit__(None, None, None)
    assert takes_over(folder)


def test_a_failed_build_gives_the_lock_back(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), ArtifactWriter(tmp_path / "some.skv"):
        raise ZeroDivisionError
    small_artifact(tmp_path / "some.skv")
    (tmp_path / "some.skv" / MANIFEST).write_text("{}")
    for _ in range(2):
        with refused("damaged"):
            small_artifact(tmp_path / "some.skv")


def test_too_little_space_is_told_before_the_work(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "some.skv") as writer:
        writer.need_space(1)
        with refused(str(tmp_path / "some.skv"), "needs 1000000000 MB", "--output", "--max-tokens"):
            writer.need_space(10**15)
