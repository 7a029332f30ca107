"""Parameters that every method has."""

import pytest

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.indexers.interface import LARGEST_SEED, indexers


@pytest.mark.parametrize("seed", [-1, LARGEST_SEED + 1])
def test_a_seed_that_not_every_library_takes_is_refused_by_its_flag(seed: int) -> None:
    for indexer in indexers().values():
        with pytest.raises(UsageError, match=f"--seed {seed}: give a number from 0 to {LARGEST_SEED}"):
            indexer(seed=seed)
