"""Two indices of one model, built once, and schedulers that a test need not close."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.served import Served, two_indices

from sparsekv.runtime.serving.scheduler import Scheduler

Make = Callable[..., Scheduler]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(two_indices(tmp_path_factory.mktemp("served")))


@pytest.fixture
def make(served: Served) -> Iterator[Make]:
    """Makes a scheduler over both indices."""
    made = []

    def scheduler(**arguments: Any) -> Scheduler:
        made.append(Scheduler(served.indices, **arguments))
        return made[-1]

    yield scheduler
    for one in made:
        one.close(0)
