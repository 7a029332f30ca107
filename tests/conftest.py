"""Fixtures of all tests: the embedded model, converted at most once per machine."""

import gc
import os
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from support.files_in_memory import keep_files_in_memory
from support.freed_memory import keep_freed_memory
from support.thinned import mark_rest_slow
from support.unsynced import sync_nothing

if TYPE_CHECKING:
    from sparsekv.formats.models.load import LoadedModel

ROOT = Path(__file__).parent.parent
# A machine may be busy with other work, and nothing here is timed.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
# `python -m pytest` puts the root there, where transformers would take `kernels/` for the hub's package of that name.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT]


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Called as soon as this file is read: before anything imports numpy, which starts its threads then, or triton,
    which defines functions of its own."""
    # Products of matrices as small as in Triton's interpreter: threads that share one mostly wait, and spin meanwhile.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # tests of several threads run beside other tests
    keep_files_in_memory()
    if not _hands_out(pluginmanager.get_plugin("pytestconfig").known_args_namespace):
        import torch

        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"  # without a GPU kernels are interpreted


def pytest_collection(session: pytest.Session) -> None:
    """Nothing that is collected or imported meanwhile is garbage: to look for some again and again takes seconds."""
    if not _hands_out(session.config.option):
        gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before slow tests are taken out. On a GPU all cases run, for there each is compiled to a program of its own."""
    import torch

    if not torch.cuda.is_available():
        mark_rest_slow(items)


def pytest_collection_finish() -> None:
    """Torch and transformers make thousands of objects a forward pass, few of them garbage in cycles."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    # Whoever starts the tests in the background has them ignore Ctrl-C, and what they start with them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(RootAsFolder())
    for name in ("INDEX", "MODEL", "DEVICE", "DTYPE"):
        os.environ.pop(f"SPARSEKV_{name}", None)
    for name in ("COLUMNS", "LINES"):  # set by xdist; a terminal's size is then not asked for
        os.environ.pop(name, None)
    os.environ["SPARSEKV_SERVER"] = "off"  # a server that the user has started
    if _hands_out(config.option):
        return
    _own_cache(config)
    keep_freed_memory()
    sync_nothing()
    # Parallel workers with a thread per core each would only wait for one another.
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


class RootAsFolder:
    """Pytest's plugin that collects the repository's root as a folder.

    As a package, for it has `__init__.py`, pytest would import it under the checkout's name beside `sparsekv`.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        if path != ROOT:
            return None
        folder: pytest.Collector = pytest.Dir.from_parent(parent, path=path)
        return folder


def _hands_out(options: Namespace) -> bool:
    """Whether this process only hands tests to workers, so that they need not wait for its imports."""
    return "PYTEST_XDIST_WORKER" not in os.environ and bool(getattr(options, "numprocesses", None))


def _own_cache(config: pytest.Config) -> None:
    """Give the commands a cache of their own, which has the models of the user's cache and nothing else of it."""
    from sparsekv.formats.user.cache import cache_root

    models = cache_root() / "models"
    models.mkdir(parents=True, exist_ok=True)
    folder = tempfile.TemporaryDirectory(prefix="sparsekv-tests-")
    config.add_cleanup(folder.cleanup)
    (Path(folder.name) / "models").symlink_to(models.resolve())
    os.environ["SPARSEKV_CACHE"] = folder.name


@pytest.fixture(scope="session", autouse=True)
def short_eviction() -> Iterator[None]:
    """Commands that time steps evict the caches before each run, by reading far more memory than these models have. No
    test depends on what a cache holds, nor on the size of the copy by which bandwidth is measured."""
    from sparsekv.runtime.benchmark import clock

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "CPU_EVICTED", 1 << 20)
        patch.setattr(clock, "CPU_COPIED", 1 << 22)
        yield


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """The embedded model's folder in the user's cache ($SPARSEKV_CACHE or the default); converts it the first time."""
    from sparsekv.formats.models.find import pull_embedded

    return pull_embedded()


@pytest.fixture(scope="session")
def embedded(embedded_folder: Path) -> "LoadedModel":
    """The embedded model in float32 on the CPU."""
    from sparsekv.formats.models.find import EMBEDDED
    from sparsekv.formats.models.load import load_model

    return load_model(EMBEDDED, device="cpu", dtype="float32")
