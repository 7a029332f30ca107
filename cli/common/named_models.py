"""Models that a person has named with --model: these alone an index may name after them."""

import json
import os
import shlex

from sparsekv.cli.common.console import note
from sparsekv.formats.errors import SparsekvError
from sparsekv.indexing.models.embedded import EMBEDDED, damaged_files, embedded_path
from sparsekv.indexing.models.user_cache import cache_root, read_small, replace_small

_FILE = "named_models.json"


def remember(name: str) -> None:
    """Keep the whole name of a model that was named with --model and loaded; a cache that cannot be written keeps
    none."""
    known = _known()
    if name == EMBEDDED or name in known:
        return
    replace_small(cache_root() / _FILE, json.dumps(sorted({*known, name}), indent=1) + "\n")


def named_by_index(name: str, *, quiet: bool) -> str:
    """The model that an index names, if it is the embedded one or a person has named it before; a note says so.

    Raises:
        SparsekvError: nobody has named it here, it is a folder that is gone, or the embedded one and not in the cache.
    """
    if name == EMBEDDED:
        if damaged_files(embedded_path(), full=False):
            raise SparsekvError(f"{name} is not in the cache; fetch it with `sparsekv models pull`")
        return name
    if os.path.isabs(name) and not os.path.isdir(name):
        raise SparsekvError(f"the index was built with {name}, and no such folder is here; add --model PATH")
    # What somebody laid here under a hub model's name is not what was named.
    if name not in _known() or (not os.path.isabs(name) and os.path.lexists(name)):
        raise SparsekvError(
            f"the index was built with {name}, which you have not named on this machine: add --model "
            f"{shlex.quote(name)} if you trust it"
        )
    note(f"loading {name}, which the index names and you have named before", quiet=quiet)
    return name


def _known() -> list[str]:
    try:
        found = json.loads(read_small(cache_root() / _FILE) or "[]")
    except (ValueError, RecursionError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
