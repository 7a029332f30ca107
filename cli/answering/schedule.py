"""A schedule as CSAttention writes it, such as `0.15-step-4`: a budget, and how often to search."""

import re

from sparsekv.formats.errors import UsageError


def parse_schedule(text: str) -> tuple[str, int]:
    """The budget as it was written, and the steps from one search to the next.

    Raises:
        UsageError: it is not BUDGET-step-STEPS.
    """
    found = re.fullmatch(r"(.+)-step-(\d+)", text)
    if found is None:
        raise UsageError(f"--schedule {text}: give BUDGET-step-STEPS, such as 0.15-step-4")
    return found[1], int(found[2])
