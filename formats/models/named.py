"""Remember which models the user has named: only those are loaded when an index asks for them.

An index may come from someone else, who must not decide which models are downloaded and run.
"""

import json
import os
import shlex
from collections.abc import Callable

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.models.embedded import EMBEDDED, damaged_files, embedded_path
from sparsekv.formats.user_cache import cache_root, read_small, replace_small

_FILE = "named_models.json"


def remember(name: str) -> None:
    """Keep the whole name of a model that the user named and that loaded; a cache that cannot be written keeps none."""
    known = _known()
    if name == EMBEDDED or name in known:
        return
    replace_small(cache_root() / _FILE, json.dumps(sorted({*known, name}), indent=1) + "\n")


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
    # A local folder with the name of a hub model is not the model that was named.
    if name not in _known() or (not os.path.isabs(name) and os.path.lexists(name)):
        raise SparsekvError(
            f"the index was built with {name}, which you have not named on this machine: add --model "
            f"{shlex.quote(name)} if you trust it"
        )
    progress(f"loading {name}, which the index names and you have named before")
    return name


def is_named(name: str) -> bool:
    """Whether the user has named this model on this machine, or it is the embedded one."""
    return name == EMBEDDED or name in _known()


def _known() -> list[str]:
    try:
        found = json.loads(read_small(cache_root() / _FILE) or "[]")
    except (ValueError, RecursionError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
