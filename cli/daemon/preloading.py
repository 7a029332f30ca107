"""What the server imports and loads before it forks, and whether that is still what the files hold."""

import importlib
import os
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass

from sparsekv.cli.common.commands import COMMANDS
from sparsekv.cli.daemon.client import ELSEWHERE

LATER = (
    "sparsekv.cli.answering.answers",
    "sparsekv.cli.answering.output",
    "sparsekv.cli.chatting.loop",
    "sparsekv.cli.common.failures",
    "sparsekv.cli.common.loading",
    "sparsekv.formats.models.causal_model",
    "sparsekv.kernels.attention.cluster_step_numba",
    "sparsekv.kernels.attention.code_step_numba",
    "sparsekv.runtime.decoding.session",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
"""Modules that commands import only when they need them."""

Look = tuple[int, int, int] | frozenset[str] | None
"""Inode, size in bytes and modification time in nanoseconds of a file, or of a folder of installed packages. The names
of modules of another folder. None if there is nothing."""


@dataclass(frozen=True)
class Preloaded:
    """Files that were imported as they were then, and the indices whose models are loaded."""

    files: dict[str, Look]
    described: list[str]

    def changed(self) -> str:
        """Return a file that has changed since it was imported, or a folder of packages; empty if there is none."""
        return next((path for path, seen in self.files.items() if look(path) != seen), "")


def look(path: str) -> Look:
    """Look at a file, or at a folder from which modules are imported."""
    try:
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode) and not path.endswith("-packages"):
            return frozenset(name for name in os.listdir(path) if name.partition(".")[0].isidentifier())
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def preload(indices: list[str]) -> Preloaded:
    """Import what commands import, and load the models of indices, without a thread that computes."""
    before = {path: look(path) for path in sys.path[0 if sys.flags.safe_path else 1 :]}
    for command in COMMANDS:
        if command not in ELSEWHERE:
            importlib.import_module(f"sparsekv.cli.{command.replace('-', '_')}")
    for module in LATER:
        with suppress(ImportError):
            importlib.import_module(module)
    imported = {path: look(path) for path in map(_file, list(sys.modules.values())) if path}
    return Preloaded({**imported, **before}, [])


def _file(module: object) -> str:
    path = getattr(module, "__file__", None)
    return path if isinstance(path, str) else ""
