"""Parse CSAttention's notation of schedules: `0.15-step-4` is a budget of 0.15 and a selection every 4 steps."""

import re

from sparsekv.formats.errors import UsageError


def parse_schedule(text: str) -> tuple[str, int]:
    """The budget as it was written, and the number of steps from one selection to the next.

    Raises:
        UsageError: it is not BUDGET-step-STEPS.
    """
    found = re.fullmatch(r"(.+)-step-(\d+)", text)
    if found is None:
        raise UsageError(f"--schedule {text}: give BUDGET-step-STEPS, such as 0.15-step-4")
    return found[1], int(found[2])
