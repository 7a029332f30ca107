"""`kill -9` at random moments of a build: the same command always finishes, and builds nothing twice."""
# A killed prefill goes on after the last chunk that is on disk: tests/indexing/test_killed_prefill.py has each chunk.

import json
import random
from pathlib import Path

import pytest
from support.command import start
from support.killed import Command
from support.tiny_models import save_tiny

from sparsekv.formats.index.reader import Artifact


def _finished_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each file that the journal or the manifest of a build calls whole."""
    files = {}
    for name in ("unfinished.json", "manifest.json"):
        if (folder / name).exists():
            files |= json.loads((folder / name).read_text())["files"]
    stats = {name: (folder / record["path"]).stat() for name, record in files.items()}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def _build(folder: Path, document: Path, *options: str | Path) -> Command:
    return Command(folder, ("build-index", document, *options, "-o", folder, "-q"))


def _survives(builder: Command, seconds: float) -> int:
    """Kill a build, finish it, and check it; returns how many files were whole when it was killed."""
    builder.kill_after(seconds)
    whole = _finished_files(builder.folder) if builder.folder.exists() else {}
    builder.run()
    finished = _finished_files(builder.folder)
    assert {name: finished[name] for name in whole} == whole
    artifact = Artifact(builder.folder)
    assert len(list(artifact.verify())) == len(artifact.manifest.files) == len(finished)
    assert not (builder.folder / "unfinished.json").exists()
    return len(whole)


def _kills(builders: list[Command], seconds: float) -> list[int]:
    moments = random.Random(0)
    return [_survives(builder, moments.uniform(0, seconds)) for builder in builders]


@pytest.mark.slow
def test_a_killed_build_goes_on(tmp_path: Path) -> None:
    """At four moments."""
    save_tiny(tmp_path / "model")
    text = tmp_path / "doc.txt"
    text.write_text("".join(f"{number} squared is {number * number}. " for number in range(150)))
    builders = [_build(tmp_path / f"{number}.skv", text, "--model", tmp_path / "model") for number in range(5)]
    seconds = builders[0].run()
    _kills(builders[1:], seconds)


CHUNK = 64


def _folder_build(tmp_path: Path, name: str) -> Command:
    """A build of a folder of files with several chunks."""
    return _build(tmp_path / name, tmp_path / "project", "--model", tmp_path / "model", "--chunk-size", str(CHUNK))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with three files, beside a model."""
    save_tiny(tmp_path / "model")
    (tmp_path / "project").mkdir()
    for name in "abc":
        lines = "".join(f"{name}: {number} squared is {number * number}. " for number in range(60))
        (tmp_path / "project" / f"{name}.txt").write_text(lines)
    return tmp_path


def _noted(folder: Path) -> int:
    """Tokens whose chunks are on disk."""
    try:
        note = json.loads((folder / "unfinished.json").read_text())["notes"]["prefill"]
    except (FileNotFoundError, KeyError, ValueError):
        return 0
    return int(note["ends"][-1])


def _sums(folder: Path) -> dict[str, str]:
    artifact = Artifact(folder)
    list(artifact.verify())
    return {name: record.sha256 for name, record in artifact.manifest.files.items()}


def _goes_on(build: Command, expected: dict[str, str]) -> None:
    """The same command loses no chunk that is on disk, and makes the same index."""
    noted, finished = _noted(build.folder), (build.folder / "manifest.json").exists()
    run = start(*build.arguments[:-1], cwd=build.folder.parent).wait()  # without -q
    assert run.code == 0, run
    told = [line for line in run.stderr.splitlines() if " tokens to prefill" in line]
    if noted and not finished and told:
        left, _, rest = told[0].partition(" of ")
        tokens = rest.partition(" tokens")[0]
        assert int(tokens.replace(",", "")) - int(left.replace(",", "")) == noted
    assert _sums(build.folder) == expected


def test_a_killed_folder_goes_on_after_its_last_chunk(project: Path) -> None:
    whole, build = _folder_build(project, "whole.skv"), _folder_build(project, "killed.skv")
    whole.run()
    for chunks in (1, 5):
        build.kill_when(lambda: _noted(build.folder) >= chunks * CHUNK)  # noqa: B023
    assert _noted(build.folder) >= 5 * CHUNK
    _goes_on(build, _sums(whole.folder))


@pytest.mark.slow
def test_a_folder_that_is_killed_at_any_second_goes_on(project: Path) -> None:
    whole, moments = _folder_build(project, "whole.skv"), random.Random(1)
    seconds, expected = whole.run(), _sums(whole.folder)
    for number in range(16):
        build = _folder_build(project, f"{number}.skv")
        for _ in range(2):
            build.kill_after(moments.uniform(0, seconds))
        _goes_on(build, expected)


@pytest.mark.slow
def test_twenty_killed_builds_of_the_real_model(embedded_folder: Path, document: Path, tmp_path: Path) -> None:
    builders = [_build(tmp_path / f"{number}.skv", document, "--max-tokens", "1024") for number in range(21)]
    seconds = builders[0].run()
    counts = _kills(builders[1:], seconds)
    assert any(0 < count < 91 for count in counts), "no kill hit the middle of the writing"
