"""The methods by name: one file each in `runtime/methods`, and those of plugins (entry points `sparsekv.methods`)."""

from collections.abc import Callable, Sequence

from sparsekv.formats.errors import UsageError
from sparsekv.formats.hints import add_methods_hint
from sparsekv.formats.reader import Artifact
from sparsekv.formats.registry import Registry
from sparsekv.formats.suggestions import suggestion
from sparsekv.runtime.selection.interface import Method

methods: Registry[type[Method]] = Registry("method", "sparsekv.runtime.methods", "sparsekv.methods", Method)

DENSE = "dense"
"""The name of attention to everything, which all methods are compared with, and which is none of them."""


def methods_of(artifact: Artifact, names: Sequence[str] = (), beside: Sequence[str] = ()) -> list[str]:
    """`choose_methods` for an index; the error for a method that it lacks shows how to add it."""

    def how(name: str) -> str:
        return f"add it with {add_methods_hint(artifact.folder, [name])}"

    return choose_methods(names, list(artifact.manifest.methods), how, beside)


def method_of(artifact: Artifact, name: str, beside: Sequence[str] = ()) -> str:
    """`methods_of` for the name of one; raises UsageError for `all`, too."""
    if name == "all":
        raise UsageError(f"name one method, not all; there are: {', '.join([*methods_of(artifact), *beside])}")
    return methods_of(artifact, [name], beside)[0]


def choose_methods(
    names: Sequence[str],
    indexed: Sequence[str],
    how: Callable[[str], str] = "build {} too".format,
    beside: Sequence[str] = (),
) -> list[str]:
    """Names of the methods to run on an index built with `indexed`; an empty list or `all` means every usable one.

    Args:
        how: says how a method that the index lacks gets into it.
        beside: what else could have been named there, and is told of beside the methods.

    Raises:
        UsageError: a method that does not exist, or that this index was not built with.
    """
    known = methods()
    usable = [name for name, method in known.items() if not method.needs_index or name in indexed]
    for name in names:
        if name == DENSE and name not in beside:
            raise UsageError(f"{name} attention is what all methods are compared with; leave it out")
        if name not in known and name != "all":
            there = [*usable, *beside]
            several = "; name each by a --method of its own" if "," in name else ""
            meant = "" if several else suggestion(name, [*known, *beside])
            lacking = [one for one in known if one not in usable]
            more = f"; not in this index: {', '.join(lacking)}" if lacking and not several else ""
            raise UsageError(f"no method '{name}'{meant}; there are: {', '.join(there)}{several or more}")
        if name != "all" and name not in usable:
            raise UsageError(
                f"the index was not built with '{name}'; {how(name)}, or choose one of: {', '.join(usable)}"
            )
    return usable if not names or "all" in names else list(dict.fromkeys(names))
