"""Bounds how long idle threads of OpenMP spin, in this process and in those that it starts."""

import os
from collections.abc import MutableMapping

SPINS = 20_000
"""Looks that a thread of GNU OpenMP takes at what it waits for before it sleeps: 0.5 ms, and 1 ms where a processor's
pause is long. With a tenth of them threads sleep between a step's operations, and a step takes a third longer; with
the library's own 300,000 they keep a core for 6 to 15 ms."""

BLOCK_MILLISECONDS = 1
"""The same for the OpenMP of Intel and LLVM, whose default is 200."""


def bound_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set how long threads of OpenMP spin, where the user has not; without effect once torch is loaded.

    A thread that spins has a core that another process may need for what the thread is waiting for.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPINS))
        environment.setdefault("KMP_BLOCKTIME", str(BLOCK_MILLISECONDS))
