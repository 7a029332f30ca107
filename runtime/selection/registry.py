"""The methods by name: one file each in `runtime/methods`, and those of plugins (entry points `sparsekv.methods`)."""

from sparsekv.formats.errors import UsageError
from sparsekv.formats.registry import Registry
from sparsekv.runtime.selection.interface import Method

methods: Registry[type[Method]] = Registry("method", "sparsekv.runtime.methods", "sparsekv.methods", Method)


def choose_methods(names: list[str], indexed: list[str]) -> list[str]:
    """Names of the methods to run on an index built with `indexed`; an empty list or `all` means every usable one.

    Raises:
        UsageError: a method that does not exist, or that this index was not built with.
    """
    known = methods()
    usable = [name for name, method in known.items() if not method.needs_index or name in indexed]
    for name in names:
        if name not in known and name != "all":
            raise UsageError(f"no method '{name}'; there are: {', '.join(known)}")
        if name != "all" and name not in usable:
            raise UsageError(
                f"the index was not built with '{name}'; add it with `sparsekv build-index --method {name}` "
                f"or choose one of: {', '.join(usable)}"
            )
    return usable if not names or "all" in names else list(dict.fromkeys(names))
