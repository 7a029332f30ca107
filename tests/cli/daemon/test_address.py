"""The server's socket replaces nothing but a socket of this user that no program listens to."""

import os
import socket
from pathlib import Path

import pytest
from support.command import fails, run_here

from sparsekv.cli.daemon.messages import refuse_listener, refuse_occupied, remove_own_socket
from sparsekv.formats.errors import UsageError


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEKV_SERVER", str(tmp_path / "notes.txt"))
    return tmp_path / "notes.txt"


def test_a_file_is_not_replaced(path: Path) -> None:
    path.write_text("mine")
    fails(2, "start", says=(str(path), "not a socket of yours", "name another place in SPARSEKV_SERVER"))
    assert run_here("stop").code == 0
    remove_own_socket(str(path))
    assert (path.read_text(), os.listdir(path.parent)) == ("mine", ["notes.txt"])


def test_a_folder_and_links_are_not_replaced(path: Path) -> None:
    path.mkdir()
    fails(2, "start", says=("not a socket of yours",))
    path.rmdir()
    path.symlink_to("nothing")
    fails(2, "start", says=("not a socket of yours",))
    assert path.is_symlink()


def test_no_folder_is_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_SERVER", str(path / "deep" / "socket"))
    fails(2, "start", says=(f"there is no folder {path / 'deep'}", "create it"))
    assert not path.exists()


def test_a_socket_is_replaced_if_no_program_listens(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        refuse_occupied(str(path))
        with pytest.raises(UsageError, match="another program listens"):
            refuse_listener(str(path))
    refuse_listener(str(path))
