"""Registry of indexers by name: files in `indexing/methods`, and plugins (entry points `sparsekv.indexers`)."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sparsekv.formats.errors import UsageError
from sparsekv.formats.parameters import given_parameters
from sparsekv.formats.registry import Registry
from sparsekv.formats.suggestions import suggestion
from sparsekv.indexing.indexers.interface import Indexer

indexers: Registry[type[Indexer]] = Registry("indexer", "sparsekv.indexing.methods", "sparsekv.indexers", Indexer)


def indexer_of(kind: type[Indexer], parameters: Mapping[str, Any]) -> Indexer:
    """An indexer with the parameters of a manifest; those that this version does not have are ignored.

    Raises:
        UsageError: a value is not allowed.
    """
    known = {one.name for one in fields(kind)}
    return kind(**given_parameters({name: value for name, value in parameters.items() if name in known}))


def choose_indexers(names: list[str]) -> list[str]:
    """Names of the methods to build: all for `all`, the default ones for an empty list.

    Raises:
        UsageError: a method that does not exist.
    """
    known = indexers()
    for name in names:
        if name not in known and name != "all":
            raise UsageError(
                f"no index is built for '{name}' (methods that need none are used as they are); these have one: "
                f"{', '.join(known)}{suggestion(name, known)}"
            )
    if not names:
        return [name for name, indexer in known.items() if indexer.by_default]
    return list(known) if "all" in names else list(dict.fromkeys(names))
