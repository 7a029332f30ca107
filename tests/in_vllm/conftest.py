"""Tests with a real vLLM, which `make test-vllm` installs in an environment of its own."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.small_index import build_small
from support.tiny_models import save_tiny
from support.vllm_library import Library, make_library
from support.vllm_steps import Steps

from sparsekv.formats.index.reader import Artifact

if TYPE_CHECKING:
    from sparsekv.formats.models.load import LoadedModel

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def library(embedded: "LoadedModel", tmp_path_factory: pytest.TempPathFactory) -> Library:
    return make_library(tmp_path_factory.mktemp("library"), embedded)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scheduling")
    save_tiny(folder / "model")
    build_small(folder / "doc.skv")
    build_small(folder / "other.skv", text="Another document. " * 100)
    return folder


@pytest.fixture(scope="session")
def document(folder: Path) -> list[int]:
    ids: list[int] = Artifact(folder / "doc.skv").input_ids().tolist()
    return ids


@pytest.fixture
def steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Steps]:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    return Steps
