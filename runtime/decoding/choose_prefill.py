"""How a question is prefilled: densely, or by a method, with its own options, that selects for its tokens."""

from collections.abc import Mapping
from typing import Any

from sparsekv.formats.errors import UsageError
from sparsekv.formats.reader import Artifact
from sparsekv.runtime.attention.question import QUESTION_BUDGET, QuestionPrefill
from sparsekv.runtime.decoding.choose_setting import BESIDE_METHODS
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.configure import configure
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.registry import DENSE, method_of, methods

OWN = "own"
"""What stands for the answer's method, with the answer's budget."""


def prefill_method(artifact: Artifact, name: str | None) -> dict[str, type[Method]]:
    """The method that `--prefill` names, under the name that errors use; empty without one, and for `dense` and
    `own`."""
    if name is None or name == OWN or name in BESIDE_METHODS:
        return {}
    try:
        chosen = method_of(artifact, name, [*BESIDE_METHODS, OWN])
    except UsageError as error:
        raise UsageError(f"--prefill {name}: {error}") from None
    return {f"--prefill {chosen}": methods()[chosen]}


def question_prefill(
    name: str | None,
    budget: str | None,
    chosen: Mapping[str, type[Method]],
    parameters: Mapping[str, Any],
    options: tuple[str, str] = ("--prefill", "--prefill-budget"),
) -> QuestionPrefill | None:
    """How a question is prefilled, densely where no `name` was given; None if the answer's method selects for it.

    Args:
        chosen: the method that was named, if it is one, as `prefill_method` returns it.
        options: those that gave `name` and `budget`.

    Raises:
        UsageError: a budget was given without a prefill method that uses one.
    """
    if budget is not None and not chosen:
        own = f"; {options[0]} own has the answer's budget" if name == OWN else ""
        raise UsageError(
            f"{options[1]} {budget}: give it with {options[0]} and a method that chooses, such as quoka{own}"
        )
    if name == OWN:
        return None
    method = next((configure(one, parameters) for one in chosen.values()), None)
    return QuestionPrefill(name or DENSE, method, Budget.parse(budget or QUESTION_BUDGET, options[1]))
