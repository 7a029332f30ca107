"""`kill -9` at random moments of a build: the same command always finishes, and builds nothing twice."""

import json
import random
from pathlib import Path

import pytest
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


@pytest.mark.slow
def test_twenty_killed_builds_of_the_real_model(embedded_folder: Path, document: Path, tmp_path: Path) -> None:
    builders = [_build(tmp_path / f"{number}.skv", document, "--max-tokens", "1024") for number in range(21)]
    seconds = builders[0].run()
    counts = _kills(builders[1:], seconds)
    assert any(0 < count < 91 for count in counts), "no kill hit the middle of the writing"
