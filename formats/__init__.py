"""The lowest package: the index on disk, documents, models, devices, processes that share a model, and errors.

The packages `indexing` and `runtime` import this package before torch. OpenMP threads' spin time is therefore set
here: it can only be set before torch is loaded.
"""

import os
from collections.abc import MutableMapping

SPINS = 20_000
"""Spins of a waiting GNU OpenMP thread before it sleeps: 0.5 ms, or 1 ms on processors with a long pause instruction.
With a tenth as many, threads sleep between the operations of a decode step, and the step takes a third longer. With the
library's default of 300,000, each waiting thread occupies a core for 6 to 15 ms."""

BLOCK_MILLISECONDS = 1
"""Milliseconds that a waiting thread of Intel's or LLVM's OpenMP spins before it sleeps; the default is 200."""


def bound_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set environment variables that limit how long OpenMP threads spin, unless the user has set them.

    If the user has set OMP_WAIT_POLICY, which also limits spinning, nothing is set. The variables have no effect once
    torch is loaded. A spinning thread occupies a core that another process may need to finish the work for which the
    thread waits.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPINS))
        environment.setdefault("KMP_BLOCKTIME", str(BLOCK_MILLISECONDS))


bound_spinning()
