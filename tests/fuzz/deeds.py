"""Deeds: what a case does with its index beside being asked, each held to an oracle of its own."""

from collections.abc import Callable
from dataclasses import dataclass

from sparsekv.runtime.decoding.open import OpenIndex

from .world import World

Run = Callable[[World, OpenIndex], None]


@dataclass(frozen=True)
class Deed:
    """What is done, and how often it is drawn beside the others. `asks`: all checks of answers go before it; builds
    take so long that one answer has to do."""

    run: Run
    weight: float
    asks: bool = True


DEEDS: dict[str, Deed] = {}


def deed(name: str, weight: float, *, asks: bool = True) -> Callable[[Run], Run]:
    """Decorator that registers a deed."""

    def add(run: Run) -> Run:
        DEEDS[name] = Deed(run, weight, asks)
        return run

    return add


from . import asking, building, choosing, commands, drawing, files, gauging, printed, reporting, serving, talking  # noqa: E402, F401
