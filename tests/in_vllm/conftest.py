"""Tests with a real vLLM, which `make test-vllm` installs in an environment of its own."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from support.vllm_library import Library, make_library

if TYPE_CHECKING:
    from sparsekv.formats.models.load import LoadedModel

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def library(embedded: "LoadedModel", tmp_path_factory: pytest.TempPathFactory) -> Library:
    return make_library(tmp_path_factory.mktemp("library"), embedded)
