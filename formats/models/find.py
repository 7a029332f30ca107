"""Find the folder of a model: of the embedded model, a converted GGUF file, a local folder or a model of the hub."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path

from sparsekv.formats.errors import SparsekvError, UsageError, suggestion
from sparsekv.formats.models.converted import first_line
from sparsekv.formats.models.embedded import EMBEDDED, cached_embedded, pull_embedded
from sparsekv.formats.user.cache import named_models

# Files needed to load a model. Pickles, and copies of the weights in other formats or in subfolders, are left out.
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
    """Return the path of a GGUF file on the hub, in the folder of its commit. Arguments and errors as `hub_folder`."""
    from huggingface_hub import hf_hub_download

    name = f"{repository}:{file}"
    return _from_hub(name, lambda: hf_hub_download(repository, file, local_files_only=not download), download=download)


def _from_hub(name: str, get: Callable[[], str], *, download: bool) -> Path:
    # The module imports the hub's HTTP client, which local models do not need.
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
        remedy = f"check its spelling, log in with `hf auth login` if it is private, or {OWN}"
        if name.startswith((".", "/", "~")):
            problem, remedy = "names a folder that does not exist", f"check its spelling, or {OWN}"
    except RemoteEntryNotFoundError:
        problem, remedy = "has no such file on the Hugging Face hub", "check its spelling"
    except LocalEntryNotFoundError:
        problem = "is neither a folder here nor in the hub's cache, and the Hugging Face hub cannot be reached"
        remedy = f"check the network and HF_HUB_OFFLINE, give a local folder, or {OWN}"
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


def fetch(name: str, progress: Progress = lambda text: None) -> None:
    """Download those files of a model that are missing on this machine. Raises the errors of `find_model`."""
    find_model(name, progress)


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
