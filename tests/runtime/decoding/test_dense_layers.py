"""Dense layers of a sparse config attend to all tokens, whatever the method selects, and read no index."""

from typing import Any

import pytest
from support.configs import sparse
from support.reference import assert_close
from support.small_index import INDEXERS, build_small, plain_logits_after, random_ids, stepped_logits

from sparsekv.runtime.attention.guard import Guard
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.window import Window
from sparsekv.runtime.selection.interface import Budget, Method

BUDGET = Budget(0.05)


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    folder = tmp_path_factory.mktemp("clustered") / "small.skv"
    return build_small(folder, "gpt-oss", methods={"multipole": INDEXERS["multipole"]})


@pytest.mark.parametrize(
    ("name", "method", "others"),
    [
        ("window", Window(), {}),
        ("quest", Quest(), {"placement": "disk"}),
        ("multipole", Multipole(stream=True, buffer=8), {"guard": Guard(0.1)}),
    ],
)
def test_answers_with_dense_layers_alone_are_dense(
    clustered: OpenIndex, name: str, method: Method, others: dict[str, Any]
) -> None:
    """With --stream no token moves into the index, although the answer is longer than the buffer."""
    tokens = random_ids(30)
    layers = len(clustered.artifact.manifest.layers)
    cache = clustered.cache(sparse(name, method, BUDGET, dense_layers=layers, **others))
    assert_close(stepped_logits(clustered, cache, tokens, 5), plain_logits_after(clustered, tokens), 1e-4)
    assert cache.kv_fraction() == 1
    assert all((one.missed, one.raised, one.dense) == (0, 0, 0) for one in cache.stats())
    assert {layer.stored for layer in cache.stored_layers} == {clustered.split.tokens}
