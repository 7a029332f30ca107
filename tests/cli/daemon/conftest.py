"""A server of a user of its own, and shells that use it or do not."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.command import EXECUTABLE

Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Shell:
    """A folder and an environment in which commands are typed."""

    folder: Path
    environment: dict[str, str]

    def begin(self, *arguments: str, **how: int | None) -> subprocess.Popen[str]:
        """Start a command with pipes."""
        pipe = subprocess.PIPE
        streams = {"stdin": pipe, "stdout": pipe, "stderr": pipe} | how
        return subprocess.Popen(
            [str(EXECUTABLE), *arguments], cwd=self.folder, env=self.environment, text=True, **streams
        )

    def run(self, *arguments: str, stdin: str = "") -> Done:
        """Run a command to its end."""
        command = [str(EXECUTABLE), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, input=stdin, capture_output=True, text=True, check=False
        )

    def script(self, text: str) -> Done:
        """Run a bash script, in the same environment: another PATH would be another environment than the server's."""
        command = ["bash", "-c", f'sparsekv() {{ {EXECUTABLE} "$@"; }}; {text}']
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )

    def server(self) -> int:
        """The process id of the server."""
        told = self.run("start", "--status").stdout
        return int(told.partition("process ")[2].partition(",")[0])


@pytest.fixture(scope="module")
def shell(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A shell with a server that has opened an index of its folder; the commands compute in two threads."""
    folder = tmp_path_factory.mktemp("shell")
    shutil.copytree(built / "doc.skv", folder / "doc.skv")
    (folder / "plugins").mkdir()
    differing = {"OMP_NUM_THREADS": "2", "SPARSEKV_SERVER": str(folder / "socket"), "PATH": os.environ["PATH"]}
    path = ":".join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder / "plugins")])
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    found = Shell(folder, environment | differing | {"PYTHONPATH": path})
    began = found.run("start", "doc.skv")
    assert began.returncode == 0, began.stderr
    yield found
    found.run("stop")
