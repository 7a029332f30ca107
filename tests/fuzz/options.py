"""Values of a method's options, drawn from its dataclass fields alone: a new method needs no line here."""

import contextlib
import re
from dataclasses import MISSING, Field, fields
from functools import cache
from random import Random
from typing import Any

from sparsekv.formats.errors import UsageError

Options = tuple[tuple[str, Any], ...]
"""Options by name, as in a case; options that are left out have their defaults."""

TRIES = 8
"""Number of times that a refused value is drawn again, before the option keeps its default."""


def draw_options(random: Random, kind: type, *, often: float = 0.4, head_dim: int | None = None) -> Options:
    """Return random options of a method, an indexer or a prefill that its class accepts together.

    Args:
        head_dim: channels of the heads that an indexer is for; options that it refuses for them are drawn again.
    """
    chosen: dict[str, Any] = {}
    for field in fields(kind):
        if random.random() >= often:
            continue
        for _ in range(TRIES):
            value = _draw(random, kind, field)
            if _accepts(kind, chosen | {field.name: value}, head_dim):
                chosen[field.name] = value
                break
    return tuple(chosen.items()) if _accepts(kind, chosen, head_dim) else draw_fitting(random, kind, chosen, head_dim)


def draw_fitting(random: Random, kind: type, chosen: dict[str, Any], head_dim: int | None) -> Options:
    """Return the options with one more number, for a class that refuses its default, such as one that must divide
    another."""
    numbers = [field.name for field in fields(kind) if type(_default(field)) is int]
    changes = [(name, value) for name in numbers for value in range(1, 65)]
    for name, value in random.sample(changes, len(changes)):
        if _accepts(kind, chosen | {name: value}, head_dim):
            return tuple((chosen | {name: value}).items())
    return tuple(chosen.items())


def _accepts(kind: type, options: dict[str, Any], head_dim: int | None) -> bool:
    try:
        made = kind(**options)
        if head_dim is not None:
            made.check_channels(head_dim)
    except UsageError:
        return False
    return True


def _default(field: Field[Any]) -> Any:
    return field.default if field.default is not MISSING else None


def _draw(random: Random, kind: type, field: Field[Any]) -> Any:
    """Return a value of a field's type: near its default, at a limit, or anywhere."""
    default = _default(field)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        near = [default - 1, default + 1, default // 2, default * 2, default // 8]
        return random.choice([*near, 0, 1, 2, 3, 4, 8, 16, random.randint(1, 60)])
    if isinstance(default, float):
        near = [default, default / 2, default * 2, 1.0 - default]
        return random.choice([*near, 0.0, 0.03, 0.25, 0.5, 0.9, 1.0, 1.5, 2.0, 4.0, round(random.random(), 3)])
    if isinstance(default, str):
        return random.choice(choices_of(kind, field.name))
    if isinstance(default, tuple):
        shares = {round(random.choice([0.5, 0.25, 0.1, 0.05]) * random.random() + 0.002, 4) for _ in range(3)}
        return tuple(sorted(shares, reverse=True)[: random.randint(1, 3)])
    raise TypeError(f"{kind.__name__}.{field.name}: the fuzzer draws no {type(default).__name__} yet")


@cache
def choices_of(kind: type, name: str) -> tuple[str, ...]:
    """Return the texts that an option accepts, among the words of its help and of the error for a wrong value."""
    (field,) = (one for one in fields(kind) if one.name == name)
    told = str(field.metadata.get("help", ""))
    try:
        kind(**{name: "?"})
    except UsageError as error:
        told = f"{error} {told}"
        words = re.findall(r"[a-z][a-z0-9-]*", told)
    else:  # The class accepts any text, and only its use refuses one. So the words that the help lists are drawn.
        words = re.findall(r"[a-z][a-z0-9-]*", told.rpartition(":")[2])
    found = {str(_default(field))}
    for word in words:
        with contextlib.suppress(UsageError):
            kind(**{name: word})
            found.add(word)
    return tuple(sorted(found))
