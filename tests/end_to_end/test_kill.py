"""`kill -9` at random moments of a build: the same command always finishes, and builds nothing twice."""

import json
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.command import ENVIRONMENT, EXECUTABLE
from support.tiny_models import save_tiny

from sparsekv.formats.reader import Artifact


@dataclass(frozen=True)
class _Builder:
    """One build command, to be run, or killed after a while, as often as it takes."""

    folder: Path
    arguments: tuple[str | Path, ...]

    def start(self) -> subprocess.Popen[str]:
        command = [EXECUTABLE, "build-index", *self.arguments, "-o", self.folder, "-q"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)

    def run(self) -> float:
        """Seconds that a whole run took."""
        started = time.monotonic()
        process = self.start()
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        return time.monotonic() - started

    def kill_after(self, seconds: float) -> None:
        process = self.start()
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        process.communicate()

    def finished_files(self) -> dict[str, tuple[int, int]]:
        """Inode and time of each file that the journal or the manifest calls whole."""
        files = {}
        for name in ("unfinished.json", "manifest.json"):
            if (self.folder / name).exists():
                files |= json.loads((self.folder / name).read_text())["files"]
        stats = {name: (self.folder / record["path"]).stat() for name, record in files.items()}
        return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def _survives(builder: _Builder, seconds: float) -> int:
    """Kill a build, finish it, and check it; returns how many files were whole when it was killed."""
    builder.kill_after(seconds)
    whole = builder.finished_files() if builder.folder.exists() else {}
    builder.run()
    finished = builder.finished_files()
    assert {name: finished[name] for name in whole} == whole
    artifact = Artifact(builder.folder)
    assert len(list(artifact.verify())) == len(artifact.manifest.files) == len(finished)
    assert not (builder.folder / "unfinished.json").exists()
    return len(whole)


def _kills(builders: list[_Builder], shortest: float, seconds: float) -> list[int]:
    moments = random.Random(0)
    return [_survives(builder, moments.uniform(shortest, seconds)) for builder in builders]


def test_a_killed_build_goes_on(tmp_path: Path) -> None:
    """Four moments after the start of the program, which is most of this small build's time."""
    save_tiny(tmp_path / "model")
    text = tmp_path / "doc.txt"
    text.write_text("".join(f"{number} squared is {number * number}. " for number in range(150)))
    builders = [_Builder(tmp_path / f"{number}.skv", (text, "--model", tmp_path / "model")) for number in range(5)]
    seconds = builders[0].run()
    _kills(builders[1:], 0.6 * seconds, seconds)


@pytest.mark.slow
def test_twenty_killed_builds_of_the_real_model(embedded_folder: Path, document: Path, tmp_path: Path) -> None:
    builders = [_Builder(tmp_path / f"{number}.skv", (document, "--max-tokens", "1024")) for number in range(21)]
    seconds = builders[0].run()
    counts = _kills(builders[1:], 0, seconds)
    assert any(0 < count < 91 for count in counts), "no kill hit the middle of the writing"
