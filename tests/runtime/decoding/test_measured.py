"""Measuring what a step leaves changes no answer, and what is read again does not depend on time."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.configs import sparse
from support.reference import assert_close, relative_error
from support.small_index import build_small, random_ids, stepped_logits

from sparsekv.indexing.indexers.interface import indexers
from sparsekv.runtime.attention.guard import Guard, estimates_missed
from sparsekv.runtime.attention.plan import Prefetcher, wait_for_searches
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.lessismore import LessIsMore
from sparsekv.runtime.methods.tidaldecode import TidalDecode
from sparsekv.runtime.selection.interface import Budget, Method, methods

QUESTION = 40
"""Tokens: more than what codes choose for together."""
TELLING = sorted(name for name, method in methods().items() if estimates_missed(method(), residual=False))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    wanted = {name: make() for name, make in indexers().items() if name in TELLING or name == "multipole"}
    return build_small(tmp_path_factory.mktemp("measured") / "small.skv", "smollm3", methods=wanted, tokens=500)


@pytest.mark.thinned
@pytest.mark.parametrize("limit", [None, Guard(0.9999)], ids=["gauge", "a guard that never acts"])
@pytest.mark.parametrize("name", TELLING)
def test_measuring_changes_nothing(index: OpenIndex, name: str, limit: Guard | None) -> None:
    tokens, method = random_ids(QUESTION + 3, 5), methods()[name]()
    plain = stepped_logits(index, index.cache(sparse(name, method, Budget(0.05))), tokens, QUESTION)
    cache = index.cache(sparse(name, method, Budget(0.05), gauge=True, guard=limit))
    assert_close(stepped_logits(index, cache, tokens, QUESTION), plain.double(), 1e-4)


def test_a_guard_brings_a_question_nearer_to_dense_attention(index: OpenIndex) -> None:
    tokens, method = random_ids(QUESTION + 1, 7), methods()["codes"]()
    dense = stepped_logits(index, index.dense_cache(), tokens, QUESTION).double()

    def error(**options: Any) -> float:
        cache = index.cache(sparse("codes", method, Budget(2), **options))
        return relative_error(stepped_logits(index, cache, tokens, QUESTION), dense)

    assert error(guard=Guard(0.05)) < error()


@pytest.mark.parametrize("name", ["lessismore", "tidaldecode"])
def test_what_is_read_again_does_not_depend_on_how_fast_searches_are(
    index: OpenIndex, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers share a ranking, which a search of the same step replaces meanwhile."""
    method: Method = {"lessismore": LessIsMore(), "tidaldecode": TidalDecode()}[name]
    run, following = Prefetcher._run, Prefetcher.next

    def slowly(self: Prefetcher, *given: Any) -> Any:
        time.sleep(0.01)
        return run(self, *given)

    def at_once(self: Prefetcher, *given: Any) -> Any:
        found = following(self, *given)
        wait_for_searches()
        return found

    def logits(run: Callable[..., Any], following: Callable[..., Any]) -> torch.Tensor:
        monkeypatch.setattr(Prefetcher, "_run", run)
        monkeypatch.setattr(Prefetcher, "next", following)
        options: dict[str, Any] = {"residual": True, "guard": Guard(0.5), "ahead": True}
        cache = index.cache(sparse(name, method, Budget(0.05), **options))
        return stepped_logits(index, cache, random_ids(30, 2), 20)

    assert torch.equal(logits(slowly, following), logits(run, at_once))
