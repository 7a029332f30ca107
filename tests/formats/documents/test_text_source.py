"""A text from any source is read, or one line says why not; a pipe without a writer does not hang."""

import io
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsekv.formats.documents import document
from sparsekv.formats.documents.document import open_source, read_bytes
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.index.schema import MANIFEST

DATA = bytes(range(256)) * 5000


@pytest.fixture
def pipe(tmp_path: Path) -> str:
    """Path of a named pipe."""
    os.mkfifo(tmp_path / "pipe")
    return str(tmp_path / "pipe")


def _writing(path: str, write: Callable[[int], None]) -> threading.Thread:
    def run() -> None:
        file = os.open(path, os.O_WRONLY)
        try:
            write(file)
        finally:
            os.close(file)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_file_comes_back_whole_or_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(DATA)
    assert read_bytes(str(tmp_path / "text")) == DATA
    assert read_bytes(str(tmp_path / "text"), limit=1000) == DATA[:1000]
    with open_source(str(tmp_path / "text")) as reader:
        assert reader.read(10) + reader.read() == DATA


def test_an_endless_file_is_read_no_further_than_wanted() -> None:
    assert read_bytes("/dev/zero", limit=1000) == bytes(1000)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(DATA)))
    assert read_bytes("-") == DATA


def test_standard_input_that_does_not_wait_is_read_to_its_end() -> None:
    """Another program that has the same pipe may have set it so; what has not come yet is not the end."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    command = [
        sys.executable,
        "-c",
        "from sparsekv.formats.documents.document import *; print(len(read_bytes('-')))",
    ]
    with subprocess.Popen(command, stdin=ours, stdout=subprocess.PIPE, text=True) as reading:
        os.write(theirs, b"first")
        time.sleep(3)
        os.write(theirs, b"second")
        os.close(theirs)
        assert reading.communicate()[0] == "11\n"
    os.close(ours)


def test_closed_standard_input_is_named() -> None:
    script = "from sparsekv.formats.documents.document import read_bytes\nread_bytes('-')"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, preexec_fn=lambda: os.close(0), capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(
        "UsageError: standard input is closed; name a file, or pipe a text to the command"
    )


def test_a_pipe_is_read_to_its_end(pipe: str) -> None:
    def write(file: int) -> None:
        for start in range(0, len(DATA), 4096):
            os.write(file, DATA[start : start + 4096])

    thread = _writing(pipe, write)
    assert read_bytes(pipe) == DATA
    thread.join()


def test_a_writer_that_is_slow_is_waited_for(pipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "PATIENCE", 0.2)

    def write(file: int) -> None:
        for piece in (b"late ", b"but there"):
            time.sleep(1)
            os.write(file, piece)

    thread = _writing(pipe, write)
    assert read_bytes(pipe) == b"late but there"
    thread.join()


def test_a_pipe_that_nobody_writes_to_is_given_up(pipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "PATIENCE", 0.2)
    with pytest.raises(SparsekvError, match=r"pipe: no program writes to this pipe; start the program"):
        read_bytes(pipe)


def test_a_pipe_whose_writer_wrote_nothing_is_empty(pipe: str) -> None:
    thread = _writing(pipe, lambda file: time.sleep(0.3))
    assert read_bytes(pipe) == b""
    thread.join()


@pytest.mark.parametrize(("command", "text"), [("true", b""), ("echo late", b"late\n"), ("sleep 1; echo b", b"b\n")])
def test_process_substitution(command: str, text: bytes) -> None:
    """A pipe whose writer wrote nothing is at its end already, and is not waited for."""
    script = (
        "import sys\nfrom sparsekv.formats.documents import document\ndocument.PATIENCE = 0.2\n"
        "sys.stdout.buffer.write(document.read_bytes(sys.argv[1]))"
    )
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" <({command})', sys.executable, script], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, text), done.stderr


def _socket(place: Path) -> str:
    os.chdir(place)  # a socket's path may have at most 107 bytes
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
    return "socket"


def _index(place: Path) -> str:
    (place / MANIFEST).write_text("{}")
    return str(place)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda place: str(place), UsageError, "is a folder; name a text file in it"),
        (_index, UsageError, "is an index; name a text file"),
        (lambda place: str(place / "none"), UsageError, "no such file: .*none"),
        (lambda place: "", UsageError, "no such file: ''"),
        (lambda place: "a\0b", UsageError, "no such file"),
        (lambda place: str(place / ("n" * 300)), SparsekvError, "cannot read .*: file name too long; "),
        (lambda place: "/proc/self/mem", SparsekvError, "cannot read /proc/self/mem: input/output error; "),
        (_socket, UsageError, "socket is a socket; name a text file"),
    ],
)
def test_what_is_no_text_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], str], error: type[Exception], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=says):
        read_bytes(make(tmp_path))
