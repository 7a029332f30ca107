"""Refuse memory limits (`ulimit -v`) under which libraries abort the process instead of raising an exception."""

import resource
from pathlib import Path

from sparsekv.formats.errors import SparsekvError

LEAST = 768 * 2**20
"""Bytes of address space that torch and transformers need to load."""
LEAST_LEFT = 640 * 2**20
"""Bytes of address space that threads and a small model take after everything is loaded: a thread reserves some 70
MiB, and some libraries abort when a thread cannot start."""


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
