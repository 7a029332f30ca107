"""Limits on memory below which libraries abort, while they load or start threads, where Python cannot tell of it."""

import resource
from pathlib import Path

from sparsekv.formats.errors import SparsekvError

LEAST = 768 * 2**20
"""Bytes of addresses that torch and transformers need to load."""
LEAST_LEFT = 640 * 2**20
"""Bytes of addresses, beside all that has been loaded, that threads and a small model take: a thread reserves some 70
MiB of them, and some libraries abort where one cannot."""


def refuse_small_limit() -> None:
    """Raise SparsekvError under a limit (`ulimit -v`) in which nothing could be loaded."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST:
        _refuse(limit, LEAST)


def refuse_little_room() -> None:
    """Raise SparsekvError where, with all loaded, a limit leaves less than anything needs."""
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
