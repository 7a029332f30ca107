"""What a search of `tune` costs: how much it measures, told as it starts, and what it took, told at its end."""

import time
from collections.abc import Callable

from sparsekv.formats.reader import Artifact
from sparsekv.runtime.tuning.candidates import candidates
from sparsekv.runtime.tuning.goals import Goal
from sparsekv.runtime.tuning.halves import Progress


def cost_ahead(artifact: Artifact, goal: Goal, names: list[str]) -> str:
    """How much a search for a goal measures; raises what `candidates` raises."""
    forms = candidates(artifact, names, residual=goal.residual)
    of = _counted(len({form.name for form in forms}), "method")
    layers = _counted(len(artifact.manifest.indexed_layers), "layer")
    return (
        f"searching {_counted(len(forms), 'form')} of {of} for {goal}: some 20 rounds over {layers}, minutes on a CPU; "
        "fewer --method take less"
    )


class Rounds:
    """Counts a search's rounds while it shows them, and the time they take.

    Args:
        show: shows a round's progress.
        begin: called before the first is shown; not earlier, for a goal may find that its model cannot be loaded.
    """

    def __init__(self, show: Progress, begin: Callable[[], None]):
        self._show, self._begin, self._stages, self._began = show, begin, set[str](), 0.0

    def show(self, stage: str, done: int, of: int) -> None:
        """Show a round's progress."""
        if not self._stages:
            self._begin()
            self._began = time.monotonic()
        self._stages.add(stage)
        self._show(stage, done, of)

    def taken(self) -> str:
        """How many rounds there were, and their time."""
        return f"searched in {_counted(len(self._stages), 'round')}, {time.monotonic() - self._began:.0f} s"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
