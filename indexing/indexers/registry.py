"""The indexers by name: a file each in `indexing/methods`, and installed ones (entry points `sparsekv.indexers`)."""

from sparsekv.formats.errors import UsageError
from sparsekv.formats.registry import Registry
from sparsekv.indexing.indexers.interface import Indexer

indexers: Registry[type[Indexer]] = Registry("indexer", "sparsekv.indexing.methods", "sparsekv.indexers", Indexer)


def choose_indexers(names: list[str]) -> list[str]:
    """Names of the methods to build: all of them for `all`, those that are built by default for an empty list.

    Raises:
        UsageError: a method that does not exist.
    """
    known = indexers()
    for name in names:
        if name not in known and name != "all":
            raise UsageError(f"no method '{name}' can be built; there are: {', '.join(known)}")
    if not names:
        return [name for name, indexer in known.items() if indexer.by_default]
    return list(known) if "all" in names else list(dict.fromkeys(names))
