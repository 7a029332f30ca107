"""Refuse memory limits (`ulimit -v`) under which libraries abort the process instead of raising an exception."""

import os
import resource
from pathlib import Path

from sparsekv.formats.errors import SparsekvError

LEAST = 768 * 2**20
"""Bytes of address space that torch and transformers need to load."""
LEAST_LEFT = (560 + 72 * (os.cpu_count() or 1)) * 2**20
"""Bytes of address space that a small model takes after everything is loaded, and a thread a core, of some 70 MiB:
libraries may abort when a thread cannot start. Measured on 2 cores: an append aborted at 650 MiB, never at 660."""


def refuse_small_limit() -> None:
    """Raise SparsekvError if a limit (`ulimit -v`) is too small to load the libraries."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST:
        _refuse(limit, LEAST)


def refuse_little_room() -> None:
    """Raise SparsekvError if, with the libraries loaded, a limit leaves less than LEAST_LEFT."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = Path("/proc/self/statm")
    if limit == resource.RLIM_INFINITY or not pages.exists():
        return
    needed = int(pages.read_text().split()[0]) * resource.getpagesize() + LEAST_LEFT
    if limit < needed:
        _refuse(limit, needed)


def _refuse(limit: int, needed: int) -> None:
    raise SparsekvError(
        f"there is not enough memory to start: a limit (ulimit -v) allows {limit >> 20} MiB; raise it to "
        f"{needed >> 20} MiB at least, and what the model needs"
    )
