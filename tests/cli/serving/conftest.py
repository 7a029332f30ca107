"""A server over two tiny indices: `doc` with the chat template and two methods, `raw` without the template."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import run_here
from support.serving import Server, serving


@pytest.fixture(scope="session")
def indices(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both indices and their model."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "model").symlink_to(built / "model")
    shutil.copytree(built / "doc.skv", folder / "doc.skv")
    raw = ("--raw", "--method", "squeezed", "-o", folder / "raw.skv", "-q")
    outcome = run_here("build-index", built / "doc.txt", "--model", built / "model", *raw)
    assert outcome.code == 0, outcome.stderr
    return folder


@pytest.fixture(scope="session")
def server(indices: Path) -> Iterator[Server]:
    with serving(indices, "doc.skv", "raw.skv", "--model", "model") as one:
        yield one
