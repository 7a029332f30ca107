"""One small home with an index for all attacks."""

from pathlib import Path

import pytest
from support.forked import zygote
from support.sandbox import Sandbox, World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """To be copied, never changed."""
    return World.make(tmp_path_factory.mktemp("world"), zygote())


@pytest.fixture
def sandbox(world: World, tmp_path: Path) -> Sandbox:
    """A home of the test's own."""
    return world.copy(tmp_path / "home")
