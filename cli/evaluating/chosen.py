"""The methods that `eval` compares, and what builds their indices."""

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.indexers.interface import Indexer
from sparsekv.indexing.indexers.registry import choose_indexers, indexers
from sparsekv.runtime.attention.config import Own
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.registry import DENSE, choose_methods, methods

QUESTION_OPTIONS = ("--question-prefill", "--question-budget")


def chosen_methods(names: list[str]) -> dict[str, type[Method]]:
    """The methods named, or all whose index can be built; none where `dense`, which always runs, is named alone."""
    others = [name for name in names if name != DENSE]
    if names and not others:
        return {}
    chosen = choose_methods(others, list(indexers()), beside=[DENSE])
    return {name: methods()[name] for name in chosen}


def asking_method(name: str) -> dict[str, type[Method]]:
    """The method that `--question-prefill` names, by its name; none for `dense` and `own`."""
    if name == "all":
        raise UsageError(f"{QUESTION_OPTIONS[0]} all: name one method, or dense or own")
    if name in (Own.name, DENSE):
        return {}
    try:
        choose_methods([name], list(indexers()), beside=[DENSE, Own.name])
    except UsageError as error:
        raise UsageError(f"{QUESTION_OPTIONS[0]} {name}: {error}") from None
    return {name: methods()[name]}


def needed_indexers(names: list[str], *, residual: bool) -> dict[str, type[Indexer]]:
    """Indexers of the named methods that have one; for a residual also the default ones, whose centroids it uses."""
    known = indexers()
    wanted = [name for name in names if name in known] + (choose_indexers([]) if residual else [])
    return {name: known[name] for name in dict.fromkeys(wanted)}
