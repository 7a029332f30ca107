"""A command whose current folder has been deleted is refused before torch is loaded, which would end the process."""

from pathlib import Path

import pytest
from support.command import fails


@pytest.mark.parametrize("command", ["generate", "start", "inspect"])
def test_a_deleted_folder_is_told(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    fails(2, command, "Why?", says=("the current folder no longer exists; change to another",))
