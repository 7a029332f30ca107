"""Fetch models of the Hugging Face hub into the hub's own cache, with every failure as a one-line error."""

import os
import shlex
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.models.embedded import EMBEDDED
from sparsekv.formats.models.model_names import named_models
from sparsekv.formats.suggestions import suggestion

# What loading reads: no pickles, no copies of the weights in other formats or in subfolders.
NEEDED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
OWN = f"take {EMBEDDED}, which needs no hub (`sparsekv models list`)"
UNNEEDED = ["*/*", "consolidated*"]


def hub_folder(name: str, *, download: bool = True) -> Path:
    """Folder of a hub model's files, named after its commit; downloads missing files unless `download` is False.

    Raises:
        UsageError: no such model, no access to it, or neither a network nor a copy in the cache.
        SparsekvError: the download broke off or could not be written.
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
    except Exception as error:  # the hub's client, by its version httpx or httpx2, has errors of its own
        remedy = "check the network and the proxy (HTTPS_PROXY), and run the same command again"
        raise SparsekvError(f"cannot download '{name}': {first_line(error)}; {remedy}") from error
    known = [EMBEDDED, *(one for one in named_models() if not os.path.isabs(one))]
    raise UsageError(f"model '{name}'{suggestion(name, known)} {problem}; {remedy}")


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's message, cut to 200 characters; the error's class if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
