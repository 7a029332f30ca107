"""Find a model's folder: that of the embedded model, a local folder, or a download in the Hugging Face hub's cache."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from sparsekv.formats.errors import SparsekvError, UsageError, suggestion
from sparsekv.formats.models.embedded import EMBEDDED, damaged_files, embedded_path, pull_embedded
from sparsekv.formats.user.cache import named_models

# Files needed to load a model. Pickles, and copies of the weights in other formats or in subfolders, are left out.
NEEDED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
OWN = f"take {EMBEDDED}, which needs no hub (`sparsekv models list`)"
UNNEEDED = ["*/*", "consolidated*"]


def hub_folder(name: str, *, download: bool = True) -> Path:
    """Return the folder of a hub model's files, which is named after the model's commit.

    Missing files are downloaded unless `download` is False.

    Raises:
        UsageError: the model does not exist or may not be accessed, or the hub is unreachable and the cache has no
            copy.
        SparsekvError: the download was interrupted or could not be written.
    """
    try:
        return Path(
            snapshot_download(name, allow_patterns=NEEDED, ignore_patterns=UNNEEDED, local_files_only=not download)
        )
    except GatedRepoError:
        problem = "asks for access"
        remedy = f"accept its terms at https://huggingface.co/{name} and log in with `hf auth login`"
    except (RepositoryNotFoundError, HFValidationError):
        problem = "is neither a folder here nor a public id on the Hugging Face hub"
        remedy = f"check its spelling, log in with `hf auth login` if it is private, or {OWN}"
        if name.startswith((".", "/", "~")):
            problem, remedy = "is no folder that is there", f"check its spelling, or {OWN}"
    except LocalEntryNotFoundError:
        problem = "is no folder here, not in the hub's cache, and the Hugging Face hub cannot be reached"
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


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message, cut to 200 characters; without one, the error's class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


Progress = Callable[[str], None]


def find_model(name: str, progress: Progress, *, download: bool = True) -> tuple[Path, str, str | None]:
    """Find a model's folder, full name and revision. Missing files are downloaded unless `download` is False.

    Raises:
        UsageError: the model does not exist, or the name is that of a file.
        SparsekvError: a download failed, or the folder cannot be read.
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
    """Download the files of a model that this machine lacks. Raises the errors of `find_model`."""
    find_model(name, progress)


def local_folder(name: str) -> Path:
    """Return the folder of a model that is on this machine, without a download.

    Raises:
        UsageError: the model is not on this machine.
        SparsekvError: the embedded model is not in the cache.
    """
    if name == EMBEDDED and damaged_files(embedded_path(), full=False):
        raise SparsekvError(f"{EMBEDDED} is not in the cache; fetch it with `sparsekv models pull`")
    return find_model(name, lambda text: None, download=False)[0]


def named_path(name: str) -> Path:
    """Convert a name to a path, with ~ expanded to the user's home folder."""
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~user of an unknown user
        return Path(name)
