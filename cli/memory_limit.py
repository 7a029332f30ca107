"""A limit on memory below which libraries abort while they load, where Python cannot tell of it."""

import resource

from sparsekv.formats.errors import SparsekvError

LEAST = 768 * 2**20
"""Bytes of addresses that torch and transformers need to load."""


def refuse_small_limit() -> None:
    """Raise SparsekvError under a limit (`ulimit -v`) in which nothing could be loaded."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST:
        raise SparsekvError(
            f"there is not enough memory to start: a limit (ulimit -v) allows {limit >> 20} MiB; raise it to "
            f"{LEAST >> 20} MiB at least, and what the model needs"
        )
