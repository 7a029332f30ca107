"""Names of models that the user has given on this machine, kept in the cache; torch is not needed for them."""

import json

from sparsekv.formats.user_cache import cache_root, read_small, replace_small

_FILE = "named_models.json"


def named_models() -> list[str]:
    """Names of hub models and whole paths of folders; empty if nothing was kept, or what was is damaged."""
    try:
        found = json.loads(read_small(cache_root() / _FILE) or "[]")
    except (ValueError, RecursionError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def keep_named(names: list[str]) -> None:
    """Replace the list; a cache that cannot be written keeps the old one."""
    replace_small(cache_root() / _FILE, json.dumps(sorted(set(names)), indent=1) + "\n")
