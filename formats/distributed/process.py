"""Which of several processes (ranks) that share one model this one is, by what its launcher told it."""

import os
from dataclasses import dataclass
from pathlib import Path

FOLDER = "SPARSEKV_RANKS"
"""The folder where ranks that `sparsekv --gpus` started meet; only they have this variable."""
LAUNCHER = "SPARSEKV_LAUNCHER"
"""The process that started these ranks, by its number."""
TOLD = "told"
"""The file in that folder which the first rank that tells the user of an error makes, with its number in it."""
_TORCHRUN = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class Place:
    """A rank's number among `size`, its number on its machine, and the folder where they meet, None under torchrun."""

    number: int
    size: int
    local: int
    folder: Path | None


def own_place() -> Place | None:
    """This process's place; None for a process that works alone.

    The variables of a rank count only beside one of `sparsekv --gpus` or torchrun: other launchers set them as well.
    """
    found = os.environ
    if (FOLDER not in found and _TORCHRUN not in found) or int(found.get("WORLD_SIZE", "1")) < 2:
        return None
    folder = Path(found[FOLDER]) if FOLDER in found else None
    return Place(int(found["RANK"]), int(found["WORLD_SIZE"]), int(found["LOCAL_RANK"]), folder)
