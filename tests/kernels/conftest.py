"""Fails tests in which an interpreted kernel accesses memory outside its tensors; and interprets them faster."""

from collections.abc import Iterator

import pytest
import torch

COMPILED = torch.cuda.is_available()
collect_ignore = ["test_bounds.py"] if COMPILED else []


@pytest.fixture(autouse=True, scope="module")
def within_bounds() -> Iterator[None]:
    if COMPILED:
        yield
        return
    from support.bounds import kernels_within_bounds
    from support.interpreter import faster_interpreter

    with kernels_within_bounds(), faster_interpreter():
        yield
