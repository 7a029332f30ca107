"""`build-index --watch`: each saved change is indexed, and nothing else begins a build."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import pytest
from support.command import fails, start
from support.forked import Run

from sparsekv.cli.building.recipe import Target
from sparsekv.cli.building.several import _Changes, build_and_watch
from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.index.manifest import read_manifest

HOW = ("--model", "model", "--method", "squeezed", "--tail", "32")
PATIENCE = 60
"""Seconds after which an expected build does not come any more."""


class Watched:
    """A command that watches, with what it has printed so far."""

    def __init__(self, place: Path, *arguments: str):
        self.told, self._rounds = place / "told.txt", 0
        self._started = start("build-index", *arguments, *HOW, "--watch", cwd=place, stderr=str(self.told))
        self.until_watching()

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, self.told.read_text()
            time.sleep(0.02)

    def until_watching(self) -> str:
        """Wait for the end of the next round of builds, and return the lines that came since the last one."""
        before = self._rounds
        self.until(lambda: len(self._parts()) > before + 1)
        self._rounds += 1
        return self._parts()[before]

    def end(self) -> Run:
        os.kill(self._started.pid, signal.SIGINT)
        return self._started.wait()

    def _parts(self) -> list[str]:
        return self.told.read_text().split("Ctrl-C ends it\n") if self.told.exists() else []


@contextmanager
def _watching(place: Path, *arguments: str) -> Iterator[Watched]:
    watched = Watched(place, *arguments)
    try:
        yield watched
    finally:
        run = watched.end()
        assert run.code == 130, run
        assert "interrupted; complete parts are kept" in watched.told.read_text()
        assert not [*place.rglob("unfinished.json"), *place.rglob("*.tmp")]


def _sums(index: Path) -> dict[str, str]:
    return {file.path: file.sha256 for file in read_manifest(index).prompt.files or ()}


def test_a_folder_with_its_index_in_it(place: Path) -> None:
    project, index = place / "project", place / "project" / "all.skv"
    (project / ".git").mkdir(parents=True)
    for name in ("a.md", "b.md"):
        (project / name).write_text(f"{name} is a file. " * 30)
    (project / ".gitignore").write_text("*.log\n")
    with _watching(place, "project", "-o", "project/all.skv", "--exclude", "*.tmpl") as watched:
        first = read_manifest(index).uuid
        for name in (".hidden", ".git/HEAD", "noise.log", "page.tmpl", "picture.png"):
            (project / name).write_bytes(b"\0text")
        time.sleep(1)  # far more than a change takes to be seen
        (project / "b.md").write_text("b has other words now. " * 30)
        told = watched.until_watching()
        assert "project/all.skv: kept" in told, "of several rounds the first has no build"
        assert told.count("tokens to prefill") == 1
        assert read_manifest(index).parent_uuid == first
        assert _sums(index)["b.md"] == hash_bytes((project / "b.md").read_bytes())
        (project / "new.md").write_text("A new file. " * 30)
        watched.until_watching()
        assert [*_sums(index)] == ["a.md", "b.md", "new.md"]
        shutil.rmtree(project / "all.skv")
        project.rename(place / "elsewhere")
        assert "cannot read project" in watched.until_watching() or "no such file: project" in watched.told.read_text()
        (place / "elsewhere").rename(project)
        watched.until(lambda: (index / "manifest.json").exists() and not (index / "unfinished.json").exists())


def test_an_edit_during_a_build_is_indexed_after_it(place: Path) -> None:
    (place / "notes.txt").write_text("The first words. " * 60)
    with _watching(place, "notes.txt", "doc.txt") as watched:
        for number, words in enumerate(("The second words. ", "The third words. ", "The last words. "), 2):
            replaced = place / "notes.new"  # as editors save
            replaced.write_text("The first words. " * 45 + words * 15)
            replaced.replace(place / "notes.txt")
            watched.until(lambda: watched.told.read_text().count("tokens to prefill") > number)  # noqa: B023
        watched.until(lambda: watched.told.read_text().endswith("Ctrl-C ends it\n"))
        wanted = hash_bytes((place / "notes.txt").read_bytes())
        assert read_manifest(place / "notes.skv").prompt.text_sha256 == wanted


def test_a_name_that_becomes_a_folder_is_watched_as_one(place: Path) -> None:
    changes = _Changes([Target("later", Path("later.skv"))])
    Path("later").mkdir()
    changes.wait()
    Path("later", "a.md").write_text("New.")
    waiting = Thread(target=changes.wait, daemon=True)
    waiting.start()
    waiting.join(PATIENCE / 6)
    assert not waiting.is_alive()
    changes.close()


def test_hidden_folders_that_are_named_beside_their_parent_are_watched(place: Path) -> None:
    hidden = [place / f".notes{number}" for number in range(40)]
    for folder in hidden:
        folder.mkdir()
    changes = _Changes([Target(".", Path("all.skv"), (".", *map(str, hidden)))])
    changes.close()
    ignored = [folder.name for folder in hidden if not changes._counts_below(None, str(folder / "a.md"))]
    assert not ignored, "with one folder its place in the set of folders decides"
    assert not changes._counts_below(None, str(place / ".other" / "a.md"))


def test_an_error_is_told_and_the_next_save_is_indexed(place: Path) -> None:
    text = (place / "doc.txt").read_text()
    (place / "elsewhere").mkdir()
    linked = (place / "doc.txt").rename(place / "elsewhere" / "doc.txt")
    (place / "doc.txt").symlink_to(linked)
    with _watching(place, "doc.txt") as watched:
        linked.write_bytes(b"\x89PNG\r\n\0\0\xff")
        assert "doc.txt" in (told := watched.until_watching())
        assert "is not" in told
        (place / "doc.txt").unlink()
        assert "no such file: doc.txt" in watched.until_watching()
        (place / "doc.txt").write_text(text + "Line 24 is new.\n")
        assert "tokens to prefill" in watched.until_watching()


@dataclass(frozen=True)
class _Config:
    force: bool = False


@dataclass(frozen=True)
class _Recipe:
    """A recipe that refuses the text `refused`, and whose builds of `broken` fail at the first two attempts.

    `built` lists the attempts.
    """

    built: list[str]
    config: _Config = field(default_factory=_Config)
    quiet: bool = True

    def load(self) -> None:
        pass

    def text_state(self, target: Target) -> str:
        return "the same text"

    def index(self, target: Target, *_: object) -> None:
        self.built.append(target.document)
        if target.document == "broken" and self.built.count("broken") < 3:
            raise SparsekvError("no space left")
        if target.document == "refused":
            raise UsageError("refused is not text")


def test_a_failed_build_is_tried_again_at_the_next_save_of_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cause of a failure, such as a full disk, may have been removed.

    A document that is built waits for another text, and so does one whose text is refused.
    """
    monkeypatch.chdir(tmp_path)
    saves = iter(range(4))

    def wait(_: _Changes) -> None:
        if next(saves, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(_Changes, "wait", wait)
    recipe, targets = _Recipe([]), [Target(name, Path(f"{name}.skv")) for name in ("whole", "refused", "broken")]
    with pytest.raises(KeyboardInterrupt):
        build_and_watch(recipe, targets)  # type: ignore[arg-type]
    assert recipe.built == ["whole", "refused", "broken", "broken", "broken"]
    assert capsys.readouterr().out.split() == ["whole.skv", "broken.skv"]


def test_refusals(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ("build-index", "--watch", *HOW)
    fails(2, *watch, "-", "-o", "x.skv", says=("--watch: standard input does not change; name a file",))
    fails(2, *watch, "/dev/null", "-o", "x.skv", says=("--watch: /dev/null is neither a file nor a folder",))
    fails(2, *watch, "doc.skv", says=("--watch: doc.skv is an index",))
    fails(2, *watch, "doc.txt", "--ray", "local", says=("--watch builds in this process, and --ray in others",))
    fails(2, *watch, "none.txt", says=("no such file: none.txt",))
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    fails(2, *watch, "doc.txt", says=("--watch needs watchfiles: pip install 'sparsekv[watch]'",))
