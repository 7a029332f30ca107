"""Rank of this process among the processes that share one model, read from environment variables of the launcher."""

import os
from dataclasses import dataclass
from pathlib import Path

FOLDER = "SPARSEKV_RANKS"
"""Environment variable with the folder in which ranks find each other. Only `sparsekv --gpus` sets the variable."""
LAUNCHER = "SPARSEKV_LAUNCHER"
"""Environment variable with the process id of the launcher that started these ranks."""
TOLD = "told"
"""Name of a file in the ranks' folder. The first rank that reports an error writes its number to this file."""
_TORCHRUN = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class Place:
    """A process's rank among `size` ranks.

    `number` is the rank, and `local` is the rank's number among the `local_size` ranks of this machine. `folder` is the
    folder through which ranks connect to each other; None under torchrun.
    """

    number: int
    size: int
    local: int
    local_size: int
    folder: Path | None


def own_place() -> Place | None:
    """Return this process's place among the ranks; None for a process that works alone.

    `RANK` and `WORLD_SIZE` are ignored unless a variable of `sparsekv --gpus` or of torchrun is also set, because other
    launchers set them too.
    """
    found = os.environ
    if (FOLDER not in found and _TORCHRUN not in found) or int(found.get("WORLD_SIZE", "1")) < 2:
        return None
    number, size, local = (int(found[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if FOLDER in found:
        return Place(number, size, local, size, Path(found[FOLDER]))
    return Place(number, size, local, int(found["LOCAL_WORLD_SIZE"]), None)
