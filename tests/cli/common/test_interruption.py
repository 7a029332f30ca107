"""Ctrl-C ends a command with one line that says what is kept, whatever it is doing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from support.command import EXECUTABLE, environment, run_here, start
from support.dialogue import Dialogue

from sparsekv.cli.common.process import Interruption, interruptions
from sparsekv.formats.index.manifest import JOURNAL, read_manifest

LATE = 120
"""Seconds after which a command that was interrupted is stuck."""
BUILD = ("build-index", "doc.txt", "--model", "model", "-o", "new.skv", "-q")


def _interrupt(place: Path, when: Callable[[int], bool], *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a command that is interrupted as soon as something is so."""
    command = [str(EXECUTABLE), *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=place, env=environment(), stdout=pipe, stderr=pipe, text=True)
    while process.poll() is None and not when(process.pid):
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    try:
        _, stderr = process.communicate(timeout=LATE)
    finally:
        process.kill()
    return process.returncode, stderr


def _interrupt_forked(place: Path, when: Callable[[int], bool], *arguments: str) -> tuple[int, str]:
    """The same of a command that has its imports when it starts."""
    started = start(*arguments, cwd=place)
    while not when(started.pid):
        assert _state(started.pid) != "Z", "ended before"
        time.sleep(0.002)
    os.kill(started.pid, signal.SIGINT)
    run = started.wait()
    return run.code, run.stderr


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _maps(pid: int, name: str) -> bool:
    return name in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("library", [pytest.param("libtorch_cpu", marks=pytest.mark.slow), "_multiarray_umath"])
def test_while_a_library_is_loaded(place: Path, library: str) -> None:
    code, stderr = _interrupt(place, lambda pid: _maps(pid, library), *BUILD)
    assert (code, stderr) == (
        130,
        "sparsekv: interrupted; complete parts are kept, and the same command goes on from there\n",
    )


def test_a_build_goes_on_after_it(place: Path) -> None:
    with open("doc.txt", "a", encoding="utf-8") as file:
        file.write("More and more. " * 190)
    code, stderr = _interrupt_forked(place, lambda pid: any(place.glob("new.skv/context/*")), *BUILD)
    assert (code, stderr) == (
        130,
        "sparsekv: interrupted; complete parts are kept, and the same command goes on from there\n",
    )
    assert not (place / "new.skv" / "manifest.json").exists()
    assert run_here(*BUILD).code == 0
    assert run_here("inspect", "-i", "new.skv", "--verify", "-q").code == 0


def test_over_an_index_it_says_which_one_answers_until_then(place: Path) -> None:
    before = read_manifest(place / "doc.skv")
    with open("doc.txt", "a", encoding="utf-8") as file:
        file.write("More and more. " * 190)
    unfinished = place / "doc.skv" / JOURNAL
    code, stderr = _interrupt_forked(place, lambda pid: unfinished.exists(), *BUILD[:4], "-q")
    assert code == 130
    assert stderr.endswith("goes on from there; until then, answers are those of the old index\n")
    assert read_manifest(place / "doc.skv") == before
    assert run_here("inspect", "-i", "doc.skv", "--verify", "-q").code == 0


def test_an_answer_that_breaks_off_at_a_terminal_ends_its_line(place: Path) -> None:
    asked = ("generate", "Why?", "--model", "model", "--max-new-tokens", "2000", "-q")
    with closing(Dialogue(*asked, cwd=place)) as one:
        one.until(r"\S{3}")
        one.press("c")
        shown = one.until("sparsekv: interrupted; the index is as it was\r\n")
        assert shown.endswith("\n")
        assert one.started.wait().code == 130


def test_while_it_waits_for_a_question(place: Path) -> None:
    os.mkfifo(place / "pipe")
    writer = os.open(place / "pipe", os.O_RDWR)
    code, stderr = _interrupt_forked(
        place, lambda pid: _waits_at(pid, place / "pipe"), "generate", "--prompt-file", "pipe"
    )
    os.close(writer)
    assert (code, stderr) == (130, "sparsekv: interrupted; the index is as it was\n")


def _waits_at(pid: int, pipe: Path) -> bool:
    """Whether a process has a pipe open and does nothing for a while."""
    if str(pipe) not in _open_files(pid):
        return False
    before = _processor_time(pid)
    time.sleep(0.5)
    return _processor_time(pid) == before


def _processor_time(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]


def _open_files(pid: int) -> list[str]:
    files = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since they were listed
            files.append(os.readlink(path))
    return files


def test_a_command_that_ignores_it_goes_on(place: Path) -> None:
    """As in a background job of a shell script."""
    os.mkfifo(place / "pipe")
    writer = os.open(place / "pipe", os.O_RDWR)
    asked = ("generate", "--prompt-file", "pipe", "--max-new-tokens", "2", "-q")
    started = start(*asked, cwd=place, ignored=(signal.SIGINT,))
    while str(place / "pipe") not in _open_files(started.pid):
        time.sleep(0.002)
    os.kill(started.pid, signal.SIGINT)
    os.write(writer, b"Why?\n")
    os.close(writer)
    run = started.wait()
    assert (run.code, run.stdout.count("\n"), run.stderr) == (0, 1, "")


def test_an_interrupted_batch_that_is_resumed_says_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sparsekv", "generate", "--batch-file", "q.txt", "--resume", "a.jsonl"])
    told = Interruption().told("generate")
    assert told == "interrupted; complete answers are kept, and the same command goes on from there"


def test_during_a_finaliser(capfd: pytest.CaptureFixture[str]) -> None:
    """Python only prints an exception of a finaliser, and of the hook that is told of it."""

    class Freed:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def free() -> None:
        with interruptions():
            Freed()
            time.sleep(LATE)

    with pytest.raises(KeyboardInterrupt):
        free()
    assert capfd.readouterr().err == ""
