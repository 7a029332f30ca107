"""The methods that `eval` compares, what builds their indices, and what a question's tokens attend to."""

from collections.abc import Mapping
from typing import Any

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.indexers.interface import Indexer
from sparsekv.indexing.indexers.registry import choose_indexers, indexers
from sparsekv.runtime.attention.question import QUESTION_BUDGET, QuestionPrefill
from sparsekv.runtime.decoding.choose_setting import BESIDE_METHODS
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.configure import configure
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.registry import choose_methods, methods


def chosen_methods(names: list[str]) -> dict[str, type[Method]]:
    """The methods named, or all whose index can be built; none where `dense`, which always runs, is named alone."""
    others = [name for name in names if name not in BESIDE_METHODS]
    if names and not others:
        return {}
    chosen = choose_methods(others, list(indexers()), beside=[*BESIDE_METHODS])
    return {name: methods()[name] for name in chosen}


def needed_indexers(names: list[str], *, residual: bool) -> dict[str, type[Indexer]]:
    """Indexers of the named methods that have one; for a residual also the default ones, whose centroids it uses."""
    known = indexers()
    wanted = [name for name in names if name in known] + (choose_indexers([]) if residual else [])
    return {name: known[name] for name in dict.fromkeys(wanted)}


def chosen_question(
    name: str | None, asking: Mapping[str, type[Method]], parameters: Mapping[str, Any], budget: str | None
) -> QuestionPrefill | None:
    """What `--question-prefill` and `--question-budget` say a question's tokens attend to; None: what the answer's do.

    Args:
        asking: the method of that name, if it is one.

    Raises:
        UsageError: a budget was given without a method that uses one.
    """
    if budget is not None and not asking:
        raise UsageError(f"--question-budget {budget}: give it with --question-prefill and a method, such as quoka")
    if name is None:
        return None
    method = next((configure(one, parameters) for one in asking.values()), None)
    return QuestionPrefill(name, method, Budget.parse(budget or QUESTION_BUDGET, "--question-budget"))
