"""Deeds: operations on a case's index besides questions, each compared with an oracle of its own."""

from collections.abc import Callable
from dataclasses import dataclass

from sparsekv.runtime.decoding.open import OpenIndex

from .world import World

Run = Callable[[World, OpenIndex], None]


@dataclass(frozen=True)
class Deed:
    """An operation, and the weight with which it is drawn.

    With `asks`, all checks of answers precede it. Builds take so long that one answer has to suffice for them.
    """

    run: Run
    weight: float
    asks: bool = True


DEEDS: dict[str, Deed] = {}


def deed(name: str, weight: float, *, asks: bool = True) -> Callable[[Run], Run]:
    """Decorate a function to register it as a deed."""

    def add(run: Run) -> Run:
        DEEDS[name] = Deed(run, weight, asks)
        return run

    return add


from . import (  # noqa: E402
    asking,  # noqa: F401
    building,  # noqa: F401
    choosing,  # noqa: F401
    commands,  # noqa: F401
    drawing,  # noqa: F401
    files,  # noqa: F401
    gauging,  # noqa: F401
    halving,  # noqa: F401
    masking,  # noqa: F401
    printed,  # noqa: F401
    reporting,  # noqa: F401
    resuming,  # noqa: F401
    serving,  # noqa: F401
    talking,  # noqa: F401
)
