"""A finished index for the tests of the format."""

from pathlib import Path

import pytest
from support.artifacts import small_artifact


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "some.skv"
    small_artifact(folder)
    return folder
