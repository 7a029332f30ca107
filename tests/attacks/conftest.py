"""One process to fork commands from, and one small home with an index, for all attacks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked import Zygote
from support.sandbox import Sandbox, World


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("zygote")) as started:
        yield started


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> World:
    """To be copied, never changed."""
    return World.make(tmp_path_factory.mktemp("world"), zygote)


@pytest.fixture
def sandbox(world: World, tmp_path: Path) -> Sandbox:
    """A home of the test's own."""
    return world.copy(tmp_path / "home")
