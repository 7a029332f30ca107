"""Modules, models and indices that the server loads before it forks, with a check whether their files have changed."""

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
    "sparsekv.cli.serving.server",
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
"""Modules that commands import only when they need them, and that the server imports in advance.

They include one of transformers' model families: the family of the embedded model.
"""

PARALLEL = 1 << 18
"""Number of elements in a tensor that makes torch compute in all its threads."""

GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of drivers for GPUs: NVIDIA's, AMD's, and Windows' for Linux."""

IMPORTABLE = re.compile(r"[^\W\d]\w*(\.py|\..*so)?|.*\.(dist|egg)-info")
"""File names of modules, of packages, and of the metadata of installed packages."""

Look = tuple[int, int, int] | frozenset[str] | None
"""State of a path, compared to detect changes. A file or a folder of installed packages: inode, bytes, modification
time in nanoseconds. Another folder: the names of its modules. None: nothing exists at the path."""
UNKNOWN: Look = frozenset()
"""The state of a file that always counts as changed."""


@dataclass(frozen=True)
class Preloaded:
    """The server's imported files and open indices.

    Attributes:
        files: state at the import, by path, of each folder on Python's path and of each imported file outside the
            folders of installed packages.
        indices: description of each open index, by folder.
        threads: torch's number of threads for commands.
    """

    files: dict[str, Look]
    indices: dict[Path, str]
    threads: int

    def warm_up(self) -> Iterator[None]:
        """Start torch's threads and map the memory pages of the weights; yield after each step. Called in a fork."""
        import torch

        from sparsekv.formats.device import map_pages
        from sparsekv.formats.models.load import kept_models
        from sparsekv.runtime.decoding.threads import restart_meter

        # This call comes before other threads start: the first such call after a fork renews torch's pool of threads.
        torch.set_num_threads(self.threads)
        torch.zeros(PARALLEL).add_(1)  # starts OpenMP's threads
        restart_meter()  # a later command reads how busy the cores have been since this call
        yield
        for model in kept_models():
            yield from map_pages(model.parameters())

    def described(self) -> list[str]:
        """Return a description of each open index, which also says if the index's files have changed since then."""
        from sparsekv.runtime.decoding.kept import kept_indices

        anew = "; changed since, so commands open it anew"
        return [f"{told}{anew * kept_indices.is_stale(folder, None)}" for folder, told in self.indices.items()]

    def changed(self) -> str:
        """Return a path of `files` whose state has changed since the import; "" if there is none."""
        return next((path for path, seen in self.files.items() if look(path) != seen), "")


def look(path: str) -> Look:
    """Return the state of a file, or of a folder from which modules are imported."""
    try:
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode) and not path.endswith("-packages"):
            return frozenset(filter(IMPORTABLE.fullmatch, os.listdir(path)))
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def preload(indices: list[str]) -> Preloaded:
    """Import the modules of `LATER` and of the commands that run in the server, and open the indices.

    The models of the indices are loaded too, except on a machine with a GPU. No compute threads are started, because a
    fork would lose them.
    """
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
    opened = {Path(index): _open(Path(index), threads) for index in indices}
    files = {path for path in map(_file, list(sys.modules.values())) if path and not _installed(path)}
    return Preloaded({path: _as_imported(path, began) for path in files} | before, opened, threads)


def _as_imported(path: str, began: int) -> Look:
    """Return the state of an imported file; UNKNOWN if the file was changed after the server began.

    Python may have imported the file before that change.
    """
    seen = look(path)
    return UNKNOWN if isinstance(seen, tuple) and seen[2] >= began else seen


def _installed(path: str) -> bool:
    """Whether a file is in a folder of installed packages. The folder's own state changes at each installation."""
    return "-packages/" in path


def _open(folder: Path, threads: int) -> str:
    """Open an index with its model for later forks, and return a description of the index.

    On a machine with a GPU the index is only checked, and no model is loaded, because a process that has used CUDA
    cannot be forked.
    """
    import transformers

    from sparsekv.cli.common.open_artifact import open_artifact
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
    """Open an index in a fork, which also checks that the model gives the logits that the index stores (the probe).

    The fork computes with `threads` threads. If the fork fails, it prints the error, and this process ends.
    """
    child = os.fork()
    if child == 0:
        import torch

        from sparsekv.cli.common.failures import fail
        from sparsekv.cli.common.open_artifact import open_artifact
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
    """Occupy the descriptor numbers up to MOST_NUMBER within the context. Files opened there get higher numbers.

    A fork needs the low numbers for the descriptors of its client.
    """
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
