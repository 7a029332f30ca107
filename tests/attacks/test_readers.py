"""Readers beside writers: whoever has started to read answers as the index was before, or as it is after.

A reader is stopped after a part of its usual time, the writer then runs to its end, and the reader goes on: whatever it
had not read by then is another index's, or gone. Others run beside the writer with nothing to stop them.
"""

import os
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.forked import Run, Started
from support.sandbox import DOCUMENT, INDEX, SAVED, Sandbox, World
from support.short_part import short_part

PAIRS = 100
WRITERS = ("append", "force")


def _readers(sandbox: Sandbox) -> dict[str, tuple[str | Path, ...]]:
    return {
        "disk": sandbox.asking("--placement", "disk", "--method", "squeezed"),
        "generate": sandbox.asking("--method", "multipole"),
        "recall-report": ("recall-report", "-i", INDEX, "--method", "squeezed", "--method", "csattention", "--csv"),
        "inspect": ("inspect", "-i", INDEX, "--verify", "-q", "--model", sandbox.model, "--method", "squeezed"),
        "save-to": sandbox.asking("--save-to", SAVED, "--method", "h2o"),
    }


SOME = (
    ("disk", "append", 0.7),
    ("save-to", "append", 0.8),
    ("generate", "force", 0.5),
    ("recall-report", "force", 0.6),
)
"""A reader, a writer, and the share of the reader's time after which it is stopped."""
READERS = ("disk", "generate", "recall-report", "inspect", "save-to")


def _write(sandbox: Sandbox, writer: str) -> Run:
    """Append, or build an edited document over the index."""
    if writer == "append":
        return sandbox.append()
    (sandbox.home / "doc.txt").write_text(DOCUMENT.replace("Line 1 ", "Line one "))
    return sandbox.build("--force")


def _read(sandbox: Sandbox, reader: str) -> Run:
    run = sandbox.run(*_readers(sandbox)[reader])
    assert run.code == 0, run
    return run


def _stopped(sandbox: Sandbox, reader: str, delay: float) -> Started:
    """A reader stopped after so many seconds; after fewer where it has come to its end by then."""
    while True:
        reading = sandbox.start(*_readers(sandbox)[reader])
        time.sleep(delay)
        if reading.stop():
            return reading
        reading.wait()
        shutil.rmtree(sandbox.home / SAVED, ignore_errors=True)
        delay *= 0.8


def _read_beside(sandbox: Sandbox, reader: str, writer: str, share: float, usual: float) -> Run:
    """Stop the reader after a share of its usual seconds, write, and let it go on."""
    reading = _stopped(sandbox, reader, share * usual)
    written = _write(sandbox, writer)
    os.kill(reading.pid, signal.SIGCONT)
    assert written.code == 0, written
    return reading.wait()


def _pairs(world: World, folder: Path, reader: str, writer: str, shares: list[float]) -> None:
    sandbox = world.copy(folder / "undisturbed")
    before = _read(sandbox, reader)
    shutil.rmtree(sandbox.home / SAVED, ignore_errors=True)
    assert _write(sandbox, writer).code == 0
    after = _read(sandbox, reader)
    for number, share in enumerate(shares):
        sandbox = world.copy(folder / f"{number}")
        run = _read_beside(sandbox, reader, writer, share, before.seconds)
        assert run.code == 0, f"stopped after {share:.0%}, beside {writer}: {run}"
        assert reader == "inspect" or run.stdout in (before.stdout, after.stdout), run
        _assert_whole(sandbox, reader)


def _assert_whole(sandbox: Sandbox, reader: str) -> None:
    for index in (INDEX, SAVED) if reader == "save-to" else (INDEX,):
        verified = sandbox.run("inspect", "-i", index, "--verify", "-q", "--model", sandbox.model)
        assert verified.code == 0, verified


@pytest.mark.parametrize(("reader", "writer", "share"), short_part(SOME, every=2))
def test_a_reader_answers_whatever_is_written_meanwhile(
    world: World, tmp_path: Path, reader: str, writer: str, share: float
) -> None:
    _pairs(world, tmp_path, reader, writer, [share])


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("reader", READERS)
def test_a_hundred_readers_answer_whatever_is_written_meanwhile(
    world: World, tmp_path: Path, reader: str, writer: str
) -> None:
    number = PAIRS // (len(READERS) * len(WRITERS))
    _pairs(world, tmp_path, reader, writer, [(part + 0.5) / number for part in range(number)])


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
def test_readers_and_a_writer_at_the_same_time(world: World, tmp_path: Path, writer: str) -> None:
    delays = random.Random(writer)
    for number in range(10):
        sandbox = world.copy(tmp_path / f"{number}")
        with ThreadPoolExecutor(1) as threads:
            written = threads.submit(_write, sandbox, writer)
            while not written.done():
                time.sleep(delays.uniform(0, 0.2))
                for reader in ("disk", "recall-report"):
                    _read(sandbox, reader)
            assert written.result().code == 0, written.result()
