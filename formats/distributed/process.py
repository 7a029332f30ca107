"""Determine this process's rank, among the processes that share one model, from its launcher's environment."""

import os
from dataclasses import dataclass
from pathlib import Path

FOLDER = "SPARSEKV_RANKS"
"""Environment variable with the folder through which ranks find each other. Only `sparsekv --gpus` sets it."""
LAUNCHER = "SPARSEKV_LAUNCHER"
"""Environment variable with the process id of the launcher that started these ranks."""
TOLD = "told"
"""Name of a file in that folder. The first rank that reports an error creates it and writes its index to it."""
_TORCHRUN = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class Place:
    """A process's rank among `size` ranks.

    `local` is its index on this machine. `folder` is the folder through which ranks find each other; None under
    torchrun.
    """

    number: int
    size: int
    local: int
    folder: Path | None


def own_place() -> Place | None:
    """Return this process's place among the ranks; None for a process that works alone.

    Launchers other than `sparsekv --gpus` and torchrun also set `RANK` and `WORLD_SIZE`. So these variables are ignored
    unless a variable of one of the two is set.
    """
    found = os.environ
    if (FOLDER not in found and _TORCHRUN not in found) or int(found.get("WORLD_SIZE", "1")) < 2:
        return None
    folder = Path(found[FOLDER]) if FOLDER in found else None
    return Place(int(found["RANK"]), int(found["WORLD_SIZE"]), int(found["LOCAL_RANK"]), folder)
