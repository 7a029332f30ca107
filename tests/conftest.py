"""Fixtures of all tests: the embedded model, converted at most once per machine."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports triton, which defines functions of its own then: without a GPU kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

from sparsekv.formats.models.embedded import EMBEDDED, pull_embedded
from sparsekv.formats.models.load import LoadedModel, load_model
from sparsekv.formats.user_cache import cache_root


def pytest_configure(config: pytest.Config) -> None:
    _own_cache(config)
    # Whoever starts the tests in the background has them ignore Ctrl-C, and what they start with them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Parallel workers with a thread per core each would only wait for one another.
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


def _own_cache(config: pytest.Config) -> None:
    """What commands remember of their calls stays out of the user's cache, whose models are used."""
    models = cache_root() / "models"
    models.mkdir(parents=True, exist_ok=True)
    folder = tempfile.TemporaryDirectory(prefix="sparsekv-tests-")
    config.add_cleanup(folder.cleanup)
    (Path(folder.name) / "models").symlink_to(models.resolve())
    os.environ["SPARSEKV_CACHE"] = folder.name


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """The embedded model's folder in the user's cache ($SPARSEKV_CACHE or the default); converts it the first time."""
    return pull_embedded()


@pytest.fixture(scope="session")
def embedded(embedded_folder: Path) -> LoadedModel:
    """The embedded model in float32 on the CPU."""
    return load_model(EMBEDDED, device="cpu", dtype="float32")
