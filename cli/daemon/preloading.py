"""The modules, models and indices that the server loads before it forks, and whether their files have changed."""

import importlib
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sparsekv.cli.common.commands import COMMANDS
from sparsekv.cli.daemon.client import ELSEWHERE
from sparsekv.cli.daemon.messages import MOST_NUMBER
from sparsekv.formats.models.converted import silent_transformers

LATER = (
    "sparsekv.cli.answering.answers",
    "sparsekv.cli.answering.output",
    "sparsekv.cli.answering.session",
    "sparsekv.cli.chatting.loop",
    "sparsekv.cli.common.failures",
    "sparsekv.cli.common.loading",
    "sparsekv.cli.serving.run",
    "sparsekv.formats.models.causal_model",
    "sparsekv.kernels.attention.cluster_step_numba",
    "sparsekv.kernels.attention.code_step_numba",
    "sparsekv.runtime.decoding.session",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "uvicorn.lifespan.off",
    "uvicorn.loops.asyncio",
)
"""Modules that commands import only when they need them."""

PARALLEL = 1 << 18
"""Elements of a tensor with which torch computes in all its threads."""

GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of drivers for GPUs: NVIDIA's, AMD's, and Windows' for Linux."""

IMPORTABLE = re.compile(r"[^\W\d]\w*(\.py|\..*so)?|.*\.(dist|egg)-info")
"""Names of modules, packages and descriptions of installed packages."""

Look = tuple[int, int, int] | frozenset[str] | None
"""Inode, size in bytes and modification time in nanoseconds of a file, or of a folder of installed packages. The names
of modules of another folder. None if there is nothing."""
UNKNOWN: Look = frozenset()
"""The look of a file that counts as changed."""


@dataclass(frozen=True)
class Preloaded:
    """Files that were imported as they were then, and the indices whose models are loaded."""

    files: dict[str, Look]
    described: list[str]
    threads: int

    def warm_up(self) -> Iterator[None]:
        """Do in a fork what every command does, step by step: start torch's threads, and map the weights' pages."""
        import torch

        from sparsekv.formats.device import map_pages
        from sparsekv.formats.models.load import kept_models
        from sparsekv.runtime.decoding.threads import restart_meter

        torch.set_num_threads(self.threads)  # before another thread does: torch renews its pool after a fork
        torch.zeros(PARALLEL).add_(1)  # starts OpenMP's threads
        restart_meter()  # a command that comes knows how busy the cores have been since
        yield
        for model in kept_models():
            yield from map_pages(model.parameters())

    def changed(self) -> str:
        """Return a file that has changed since it was imported, or a folder of packages; empty if there is none."""
        return next((path for path, seen in self.files.items() if look(path) != seen), "")


def look(path: str) -> Look:
    """Look at a file, or at a folder from which modules are imported."""
    try:
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode) and not path.endswith("-packages"):
            return frozenset(filter(IMPORTABLE.fullmatch, os.listdir(path)))
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def preload(indices: list[str]) -> Preloaded:
    """Import what commands import, and load the models of indices, without a thread that computes."""
    began = time.time_ns()
    before = {path: look(path) for path in sys.path[0 if sys.flags.safe_path else 1 :]}
    for command in COMMANDS:
        if command not in ELSEWHERE:
            importlib.import_module(f"sparsekv.cli.{command.replace('-', '_')}")
    for module in LATER:
        with suppress(ImportError):
            importlib.import_module(module)
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads would be lost at a fork
    described = [_open(Path(index), threads) for index in indices]
    files = {path for path in map(_file, list(sys.modules.values())) if path and not _installed(path)}
    return Preloaded({path: _as_imported(path, began) for path in files} | before, described, threads)


def _as_imported(path: str, began: int) -> Look:
    """Look at a file; a file that was changed after the server began, and perhaps imported before that, is UNKNOWN."""
    seen = look(path)
    return UNKNOWN if isinstance(seen, tuple) and seen[2] >= began else seen


def _installed(path: str) -> bool:
    """Whether a file is below a folder of packages, which changes when a package is installed."""
    return "-packages/" in path


def _open(folder: Path, threads: int) -> str:
    """Open an index for the forks to come, and return a description of it.

    Nothing is loaded where there is a GPU: a process that has used CUDA cannot be forked.
    """
    import transformers

    from sparsekv.cli.common.index_option import open_artifact
    from sparsekv.runtime.decoding.load import keep_index

    open_artifact(folder, called="INDEX")
    if any(map(os.path.exists, GPUS)):
        return f"{folder}, but for its model, which a command loads to the GPU"
    transformers.logging.set_verbosity_error()
    _check(folder, threads)
    with silent_transformers(), _low_descriptors_left():
        keep_index(folder)
    return f"{folder} with its model"


def _check(folder: Path, threads: int) -> None:
    """Check an index's probe in a fork, which may use all cores. Ends this process if the check fails."""
    child = os.fork()
    if child == 0:
        import torch

        from sparsekv.cli.common.failures import fail
        from sparsekv.cli.common.index_option import open_artifact
        from sparsekv.runtime.decoding.load import load_and_open

        torch.set_num_threads(threads)
        try:
            load_and_open(open_artifact(folder, called="INDEX"), device="cpu")
        except Exception as error:
            fail(error, "start", debug=False)
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        os._exit(max(1, code))


@contextmanager
def _low_descriptors_left() -> Iterator[None]:
    """Open no descriptor below MOST_NUMBER within the context: a fork may need those that its shell has open."""
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < MOST_NUMBER:
        taken.append(os.dup(taken[0]))
    try:
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)


def _file(module: object) -> str:
    path = getattr(module, "__file__", None)
    return path if isinstance(path, str) else ""
