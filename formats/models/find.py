"""Where a model's files lie: the embedded one's, a local folder's, or the hub cache's."""

import os
from collections.abc import Callable
from pathlib import Path

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.models.embedded import EMBEDDED, damaged_files, embedded_path, pull_embedded
from sparsekv.formats.models.hub import hub_folder

Progress = Callable[[str], None]


def find_model(name: str, progress: Progress, *, download: bool = True) -> tuple[Path, str, str | None]:
    """Folder, full name and revision of a model; downloads it unless `download` is False.

    Raises:
        UsageError: no such model, or a file.
        SparsekvError: a download that failed, or a folder that cannot be read.
    """
    if name == EMBEDDED:
        return pull_embedded(progress), name, None
    path = named_path(name)
    if not name or not os.path.exists(path):
        folder = hub_folder(name, download=download)
        return folder, name, folder.name
    if os.path.isfile(path):
        what = "a GGUF file, which is not read" if path.suffix.lower() == ".gguf" else "a file"
        raise UsageError(
            f"model '{name}' is {what}: name a folder with config.json, weights in safetensors files and a tokenizer"
        )
    if not os.access(path, os.X_OK):
        raise SparsekvError(f"model '{name}' cannot be read: permission denied; allow it, or name another model")
    if not os.path.isfile(path / "config.json"):
        raise UsageError(
            f"model '{name}' has no config.json that can be read; name a folder saved with save_pretrained, a hub id, "
            "or see `sparsekv models list`"
        )
    return path, str(path.resolve()), None


def fetch(name: str, progress: Progress = lambda text: None) -> None:
    """Download what this machine lacks of a model that is to be loaded; raises what `load_model` raises of its name."""
    find_model(name, progress)


def local_folder(name: str) -> Path:
    """The folder of a model that is on this machine.

    Raises:
        UsageError: no such model.
        SparsekvError: the embedded model is not in the cache.
    """
    if name == EMBEDDED and damaged_files(embedded_path(), full=False):
        raise SparsekvError(f"{EMBEDDED} is not in the cache; fetch it with `sparsekv models pull`")
    return find_model(name, lambda text: None, download=False)[0]


def named_path(name: str) -> Path:
    """A name as a path, from whose ~ the user's home folder has been filled in."""
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~user of an unknown user
        return Path(name)
