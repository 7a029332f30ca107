"""A folder to run commands in: a tiny model, a document and an index of it."""

import shutil
from pathlib import Path

import pytest
from support.command import run_here
from support.tiny_models import save_tiny

LINES = [f"Line {number} says that {number} times {number} is {number * number}.\n" for number in range(40)]
DOCUMENT = "".join(LINES[:24])


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model/`, `doc.txt` and `doc.skv` with two methods that choose clusters, to be copied, never changed."""
    folder = tmp_path_factory.mktemp("built")
    save_tiny(folder / "model")
    (folder / "doc.txt").write_text(DOCUMENT)
    methods = ("--method", "multipole", "--method", "squeezed")
    outcome = run_here("build-index", folder / "doc.txt", "--model", folder / "model", *methods, "-q")
    assert (outcome.code, outcome.stdout) == (0, f"{folder / 'doc.skv'}\n"), outcome.stderr
    return folder


@pytest.fixture
def place(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a copy of the index and the document, with the model beside them."""
    shutil.copytree(built / "doc.skv", tmp_path / "doc.skv")
    shutil.copy(built / "doc.txt", tmp_path)
    (tmp_path / "model").symlink_to(built / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def longer(place: Path) -> Path:
    """The current folder, whose document has over 1,024 tokens, of which the index has the first."""
    (place / "doc.txt").write_text("".join(LINES))
    return place
