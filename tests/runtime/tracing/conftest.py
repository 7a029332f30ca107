"""A small index that every method can use."""

import pytest
from support.small_index import INDEXERS, build_small

from sparsekv.runtime.decoding.open import OpenIndex


@pytest.fixture(scope="session")
def full_index(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """The tiny llama's, with the tensors of every method."""
    return build_small(tmp_path_factory.mktemp("full") / "full.skv", methods=INDEXERS)
