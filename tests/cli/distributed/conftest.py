"""An index that two ranks have built together, and one process alone."""

import pytest
from support.two_ranks import FRESH, Both, run_both


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Built by ranks from nothing, and asked."""
    return run_both(tmp_path_factory.mktemp("fresh"), ["llama"], FRESH)
