"""Inputs for tests of kernels: uneven clusters, poisoned memory, and a GPU if there is one."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Device on which kernels run: compiled on a GPU; without a GPU, in Triton's interpreter on the CPU."""

compiled_or_interpreted = [pytest.mark.gpu] if torch.cuda.is_available() else []
"""Pytest marks of modules with such tests. On a machine with a GPU, they belong to the tests of GPUs."""


def uneven_counts(seed: int, heads: int, clusters: int) -> torch.Tensor:
    """Return counts [heads, clusters] int32 of log-normal sizes, some 0 and some 1, with the same sum in each head."""
    generator = torch.Generator().manual_seed(seed)
    counts = (torch.randn(heads, clusters, generator=generator) * 1.3 + 1).exp().int()
    counts[:, torch.rand(clusters, generator=generator) < 0.2] = 0
    counts[:, torch.rand(clusters, generator=generator) < 0.2] = 1
    counts[:, 0] += counts.sum(1).max() + 1 - counts.sum(1)
    return counts.int()


def with_room(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows on the device, at the front of a buffer: the stride between heads is larger than a head's
    rows."""
    poison = torch.nan if rows.is_floating_point() else torch.iinfo(rows.dtype).max
    room = torch.full((len(rows), rows.shape[1] + 60, *rows.shape[2:]), poison, dtype=rows.dtype)
    room[:, : rows.shape[1]] = rows
    return room.to(DEVICE)[:, : rows.shape[1]]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within the context, allocated memory holds NaN, or the largest integer, until it is written."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Within the context, torch has `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
