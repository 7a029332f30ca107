"""Simplifies a case that fails, as long as it fails in the same way."""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from .case import Case

ORDER = (
    *(
        "deed",
        "placement",
        "ahead",
        "guard",
        "residual",
        "question_prefill",
        "prefill_budget",
        "kv_dtype",
        "rounded",
        "prefill",
    ),
    *("prefill_options", "options", "indexers", "questions", "answer", "rope", "window", "softcap", "tied", "template"),
    *("tokenizer", "family"),
)
"""Fields that are simplified first, because they leave out most."""


def shrunk(case: Case, fails_as: Callable[[Case], str], kind: str, seconds: float) -> Case:
    """Return the simplest case, found within some seconds, that fails as the given case does.

    Args:
        fails_as: runs a case and returns the kind of its failure; empty without a failure.
    """
    deadline, again = time.monotonic() + seconds, True
    while again:
        again = False
        for simpler in _simpler(case):
            if time.monotonic() > deadline:
                return case
            if fails_as(simpler) == kind:
                case, again = simpler, True
                break
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Yield cases with one field simplified; first those that leave out most."""
    names = [*ORDER, *(one.name for one in fields(case) if one.name not in ORDER)]
    defaults = {one.name: one.default for one in fields(case)}
    for name in names:
        value = getattr(case, name)
        for other in _values(value, defaults[name]):
            if other != value:
                yield replace(case, **{name: other})


def _values(value: Any, default: Any) -> Iterator[Any]:
    """Yield simpler values, the simplest first; for a tuple, also the tuple without one of its parts."""
    yield default
    if isinstance(value, int) and not isinstance(value, bool):
        yield from ((value + default) // 2, value - 1) if value > default else ()
    if isinstance(value, tuple):
        yield from (value[:place] + value[place + 1 :] for place in range(len(value) - 1, -1, -1) if len(value) > 1)
        for place, part in enumerate(value):
            if isinstance(part, tuple) and len(part) == 2 and isinstance(part[1], tuple) and part[1]:
                options = part[1]
                fewer = (options[:one] + options[one + 1 :] for one in range(len(options)))
                yield from ((*value[:place], (part[0], some), *value[place + 1 :]) for some in fewer)
