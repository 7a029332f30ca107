"""Determine this process's rank, among the processes that share one model, from its launcher's environment."""

import os
from dataclasses import dataclass
from pathlib import Path

FOLDER = "SPARSEKV_RANKS"
"""The folder where ranks that `sparsekv --gpus` started meet; only they have this variable."""
LAUNCHER = "SPARSEKV_LAUNCHER"
"""Environment variable with the id of the process that started these ranks."""
TOLD = "told"
"""Name of the file in that folder that the first rank to report an error creates, with its rank in it."""
_TORCHRUN = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class Place:
    """A process's rank among `size` ranks, its local rank, and the folder where ranks meet (None under torchrun)."""

    number: int
    size: int
    local: int
    folder: Path | None


def own_place() -> Place | None:
    """Return this process's place among the ranks; None for a process that works alone.

    The variables of a rank count only beside one of `sparsekv --gpus` or torchrun: other launchers set them as well.
    """
    found = os.environ
    if (FOLDER not in found and _TORCHRUN not in found) or int(found.get("WORLD_SIZE", "1")) < 2:
        return None
    folder = Path(found[FOLDER]) if FOLDER in found else None
    return Place(int(found["RANK"]), int(found["WORLD_SIZE"]), int(found["LOCAL_RANK"]), folder)
