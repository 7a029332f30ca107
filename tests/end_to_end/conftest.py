"""Indices of a real document with the real model, built once for all workers by the real command."""

from pathlib import Path

import pytest
from filelock import FileLock
from support.command import sparsekv
from support.python_help import DOCUMENT

from sparsekv.formats.index.reader import Artifact

CLUSTERED = ("--method", "multipole", "--method", "squeezed")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """One folder that all parallel workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def document(shared_folder: Path) -> Path:
    """Python's help on its language, of one version: 465,126 characters of technical prose."""
    path = shared_folder / "topics.txt"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_text(DOCUMENT, encoding="utf-8")
    return path


def _build(document: Path, name: str, tokens: int, *options: str) -> Artifact:
    folder = document.parent / name
    command = ("build-index", document, "-o", folder, "--max-tokens", str(tokens), *options)
    with FileLock(f"{folder}.building"):
        if not (folder / "manifest.json").exists():
            done = sparsekv(*command, cwd=document.parent)
            assert done.returncode == 0, done.stderr
            assert done.stdout == f"{folder}\n"
    return Artifact(folder)


@pytest.fixture(scope="session")
def index(embedded_folder: Path, document: Path) -> Artifact:
    """The first 1,024 tokens, for methods that choose clusters."""
    return _build(document, "short.skv", 1024, *CLUSTERED)


@pytest.fixture(scope="session")
def long_index(embedded_folder: Path, document: Path) -> Artifact:
    """The first 6,144 tokens, in blocks short enough that there are several; everything else by default."""
    return _build(document, "long.skv", 6144, *CLUSTERED, "--block", "2048")
