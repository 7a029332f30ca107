"""Warn about budgets of a few tokens, which were likely meant as percentages."""

from collections.abc import Iterable

from sparsekv.cli.common.console import note
from sparsekv.runtime.selection.budget import Budget

FEW = 32


def note_small_budgets(budgets: Iterable[Budget], *, quiet: bool) -> None:
    """Print a note to stderr for each budget below FEW tokens."""
    for budget in budgets:
        if not budget.is_share and budget.value < FEW:
            tokens = "one token" if budget.value == 1 else f"{budget.value} tokens"
            note(
                f"--budget {budget.value} is {tokens} of the document; {budget.value}% is written {budget.value}% or "
                f"{budget.value / 100:g}",
                quiet=quiet,
            )
