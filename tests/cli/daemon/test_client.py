"""A command leaves a socket alone that is not its own user's server."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsekv.cli.daemon.client import hand_over
from sparsekv.cli.daemon.likeness import differing, likeness
from sparsekv.cli.daemon.messages import ACCEPTED, REFUSED, receive, send, status
from sparsekv.cli.daemon.preloading import look

NOBODY = 65534


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the server of a command listens that is about to begin in this process."""
    monkeypatch.setenv("SPARSEKV_SERVER", str(tmp_path / "socket"))
    monkeypatch.setattr(sys, "argv", ["sparsekv", "generate", "Why?"])
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)  # pytest's own is no stream of Python's
        yield tmp_path / "socket"


@pytest.fixture
def listener(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        listening.settimeout(0)
        yield listening


def test_nothing_is_there(path: Path) -> None:
    hand_over()


def test_a_server_is_gone_whose_socket_is_left(path: Path, listener: socket.socket) -> None:
    listener.close()
    hand_over()
    assert status(str(path)) is None


def test_a_plain_file_is_no_server(path: Path) -> None:
    path.touch()
    hand_over()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_socket_of_another_user_is_not_connected_to(path: Path, listener: socket.socket) -> None:
    os.chown(path, NOBODY, NOBODY)
    hand_over()
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_behind_ones_own_socket_gets_nothing(path: Path) -> None:
    ready, tell = os.pipe()
    got, got_it = os.pipe()
    if (child := os.fork()) == 0:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        os.setresuid(NOBODY, NOBODY, NOBODY)
        listening.listen()
        os.write(tell, b"!")
        connection, _ = listening.accept()
        os.write(got_it, connection.recv(100) or b"nothing")
        os._exit(0)
    os.read(ready, 1)
    hand_over()
    assert os.read(got, 100) == b"nothing"
    os.waitpid(child, 0)


def test_a_server_that_refuses_is_left_alone(listener: socket.socket) -> None:
    if (child := os.fork()) == 0:
        try:
            listener.settimeout(None)
            connection, _ = listener.accept()
            request, _ = receive(connection)
            connection.sendall(REFUSED if request["arguments"] == ["sparsekv", "generate", "Why?"] else ACCEPTED)
        finally:
            os._exit(0)
    hand_over()
    os.waitpid(child, 0)


def test_no_command_of_several_processes_asks(
    path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in (["--gpus", "2", "generate", "Why?"], ["build-index", "--ray=local"], ["models", "list"], ["--help"]):
        monkeypatch.setattr(sys, "argv", ["sparsekv", *given])
        hand_over()
    monkeypatch.setattr(sys, "argv", ["sparsekv", "generate", "Why?"])
    monkeypatch.setenv("SPARSEKV_SERVER", "off")
    hand_over()
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_terminals_variables_may_differ_and_a_librarys_not(monkeypatch: pytest.MonkeyPatch) -> None:
    server = likeness()
    for name in ("TERM", "PWD", "TMUX_PANE", "SPARSEKV_INDEX"):
        monkeypatch.setenv(name, "other")
    assert differing(likeness(), server) is None
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    assert differing(likeness(), server) == "environment (OMP_DYNAMIC)"


def test_a_scheduling_policy_is_kept() -> None:
    server = likeness()
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        assert differing(likeness(), server) == "priority (nice, chrt)"
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def test_taskset_is_kept() -> None:
    server = likeness()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert len(cores) == 1 or differing(likeness(), server) == "cores (taskset)"
    finally:
        os.sched_setaffinity(0, cores)


def test_a_file_that_is_written_anew_looks_otherwise(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("one = 1")
    before, folder = look(str(module)), look(str(tmp_path))
    module.write_text("one = 20")
    assert look(str(module)) != before
    (tmp_path / "notes.skv").mkdir()
    assert look(str(tmp_path)) == folder
    (tmp_path / "package").mkdir()
    assert look(str(tmp_path)) != folder


def test_a_message_comes_whole(tmp_path: Path) -> None:
    here, there = socket.socketpair()
    with here, there, open(tmp_path / "file", "w") as file:
        send(here, {"text": "ü" * 10_000}, [file.fileno()])
        message, (descriptor,) = receive(there)
        assert message == {"text": "ü" * 10_000}
        assert os.fstat(descriptor).st_ino == os.fstat(file.fileno()).st_ino
        os.close(descriptor)
        here.sendall(b"half")
        here.close()
        with pytest.raises(ValueError, match="no message"):
            receive(there)
