"""Remember which models the user has named: only those are loaded when an index or a project's file asks for them.

These may come from someone else, who must not decide which models are downloaded and run.
"""

import os
import shlex
from collections.abc import Callable

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.models.embedded import EMBEDDED, damaged_files, embedded_path
from sparsekv.formats.models.model_names import keep_named, named_models


def remember(name: str) -> None:
    """Keep the whole name of a model that the user named and that loaded; a cache that cannot be written keeps none."""
    known = named_models()
    if name != EMBEDDED and name not in known:
        keep_named([*known, name])


def may_be_loaded(name: str) -> bool:
    """Whether a model may be loaded that a file of somebody else names: the user has too, or it is the embedded one."""
    if name == EMBEDDED:
        return True
    # A local folder with the name of a hub model is not the model that was named.
    return name in named_models() and (os.path.isabs(name) or not os.path.lexists(name))


def named_by_index(name: str, progress: Callable[[str], None]) -> str:
    """The model that an index names, if it is the embedded one or the user has named it before.

    Args:
        progress: gets a line that says so.

    Raises:
        SparsekvError: the user never named it here, its folder is gone, or the embedded model is not in the cache.
    """
    if name == EMBEDDED:
        if damaged_files(embedded_path(), full=False):
            raise SparsekvError(f"{name} is not in the cache; fetch it with `sparsekv models pull`")
        return name
    if os.path.isabs(name) and not os.path.isdir(name):
        raise SparsekvError(f"the index was built with {name}, and no such folder is here; add --model PATH")
    if not may_be_loaded(name):
        raise SparsekvError(
            f"the index was built with {name}, which you have not named on this machine: add --model "
            f"{shlex.quote(name)} if you trust it"
        )
    progress(f"loading {name}, which the index names and you have named before")
    return name


def is_named(name: str) -> bool:
    """Whether the user has named this model on this machine, or it is the embedded one."""
    return name == EMBEDDED or name in named_models()
