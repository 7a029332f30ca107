"""Parse CSAttention's notation of schedules: `0.15-step-4` is a budget of 0.15 and a selection every 4 steps."""

import re

from sparsekv.formats.errors import UsageError


def parse_schedule(text: str, budget: str | None, step: int | None) -> tuple[str, int]:
    """The budget as it was written, and the number of steps from one selection to the next.

    Args:
        budget, step: the options that it stands for.

    Raises:
        UsageError: it is not BUDGET-step-STEPS, or one of these options was given too.
    """
    if budget is not None or step is not None:
        raise UsageError("--schedule is --budget and --step in one; leave these out")
    found = re.fullmatch(r"(.+)-step-(\d+)", text)
    if found is None:
        raise UsageError(f"--schedule {text}: give BUDGET-step-STEPS, such as 0.15-step-4")
    return found[1], int(found[2])
