"""Searching a step ahead: each decode step attends to what the query of the step before asked for."""

import time
from dataclasses import replace
from threading import current_thread, main_thread
from typing import Any

import pytest
import torch
from support.random_tensors import normal
from support.small_layer import SmallLayer, as_queries, small_layer, sparse_layer
from support.small_tables import tabled_layer

from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.attention.executors import GatherExecutor
from sparsekv.runtime.attention.plan import Prefetcher, tensors_in, wait_for_searches
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.kv_store import MemoryRows
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.magicpig import MagicPIG
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import (
    Appended,
    Appending,
    Budget,
    ConversationState,
    Method,
    Queries,
    Selection,
    Selector,
)

METHODS: dict[str, Method] = {
    "squeezed": Squeezed("hierarchical"),
    "multipole": Multipole("hierarchical"),
    "multipole that streams": Multipole(stream=True, buffer=4),
    "quest": Quest(page_size=5),
}
STEPS = 14


def test_what_lies_in_a_choice_is_protected_whatever_it_is() -> None:
    """From being let go of while another stream still reads it: the weights of what was drawn, too."""
    for block, method in ((None, MagicPIG(hash_bits=2)), (64, Multipole())):
        layer = small_layer(middle=60, block=block)
        step = Queries(layer.queries[:, :, :1], lambda: torch.arange(1), lambda: torch.zeros(2, 3, 1), joint=False)
        gather = GatherExecutor(method.prepare(layer.context), MemoryRows(*_middle(layer)), layer.keys.device)
        found = gather.find(step, Budget(8))
        among = [one for part in found.rest for one in (part.keys, part.values, part.log_counts)]
        assert among or found.log_weights is not None
        wanted = {
            id(one) for one in (found.keys, found.values, found.valid, found.log_weights, *among) if one is not None
        }
        assert {id(tensor) for tensor in tensors_in(found)} >= wanted


def _middle(layer: SmallLayer) -> tuple[torch.Tensor, torch.Tensor, None, torch.device]:
    return layer.keys[:, layer.middle], layer.values[:, layer.middle], None, layer.keys.device


def test_a_search_that_fails_is_told_once() -> None:
    fails = iter([False, True, False, False, True, False, False])

    def search(queries: Queries) -> Any:
        if next(fails):
            raise OSError("the disk is gone")
        return ()

    step, prefetcher = as_queries(normal(0, 2, 3, 1, 16)), Prefetcher(search)
    assert prefetcher.next(step) == ()
    with pytest.raises(OSError, match="the disk is gone"):
        prefetcher.next(step)
    assert prefetcher.next(step) == ()
    # The one that is under way fails; nobody needs it.
    assert prefetcher.next(step) == ()
    prefetcher.forget()
    assert prefetcher.next(step) == ()


def test_a_first_search_waits_for_those_of_the_layers_before() -> None:
    """Layers may share what they found: the first step of a layer must not read what another is still writing."""
    done = list[str]()

    def search(queries: Queries) -> Any:
        if "first layer" in done:  # its second search, which a thread runs
            time.sleep(0.1)
        done.append("first layer")
        return ()

    def other(queries: Queries) -> Any:
        done.append("second layer")
        return ()

    step = as_queries(normal(0, 2, 3, 1, 16))
    first, second = Prefetcher(search), Prefetcher(other)
    first.next(step)
    second.next(step)
    assert done[:3] == ["first layer", "first layer", "second layer"]


def test_a_question_is_not_searched_for_beside_the_step_before() -> None:
    """In a talk the last step of an answer has begun a search that nobody needs."""
    layer = small_layer(3)
    ahead = sparse_layer(layer, Quest(page_size=5).prepare(layer.context), Budget(9), ahead=True)
    _decode(layer, ahead)
    prefetcher = ahead.plan.prefetcher
    assert prefetcher is not None
    assert prefetcher.pending is not None
    Hk, G, _, D = layer.queries.shape
    keys, values, query = (normal(part, heads, 3, D) for part, heads in enumerate((Hk, Hk, Hk * G)))
    ahead.update(keys[None], values[None])
    ahead.attend(AttentionCall(0, query, keys, values, layer.context.facts.softmax_scale, None, None, None))
    assert prefetcher.pending is None


class _Slow(Selector):
    """Another selector, whose selections take long in the thread of searches."""

    def __init__(self, inner: Selector):
        self.inner, self.layout = inner, inner.layout

    @property
    def conversation(self) -> ConversationState | None:
        return self.inner.conversation

    def select(self, queries: Queries, budget: Budget) -> Selection:
        if current_thread() is not main_thread():
            time.sleep(0.1)
        return self.inner.select(queries, budget)


def test_a_search_of_the_answer_before_leaves_nothing_to_the_next_answer() -> None:
    """In a talk with --step, the last step's search may still run when the next question begins."""
    tabled = tabled_layer()
    inner = CSAttention(step=100).prepare(tabled.layer.context)
    ahead = sparse_layer(tabled.layer, _Slow(inner), Budget(9), ahead=True)
    Hk, G, _, D = tabled.layer.queries.shape
    for tokens in (3, 1, 3):
        keys, values, query = (normal(part, heads, tokens, D) for part, heads in enumerate((Hk, Hk, Hk * G)))
        ahead.update(keys[None], values[None])
        ahead.attend(AttentionCall(0, query, keys, values, tabled.layer.context.facts.softmax_scale, None, None, None))
    wait_for_searches()
    assert not inner.held


class _Late(Selector):
    """Another selector, asked with the queries of the decode step before, if nothing was appended in between."""

    def __init__(self, inner: Selector):
        self.inner, self.layout = inner, inner.layout
        self.before: Queries | None = None

    @property
    def append(self) -> Appending | None:
        index = self.inner.append
        if index is None:
            return None

        def append(keys: torch.Tensor, values: torch.Tensor) -> Appended:
            self.before = None
            return index.append(keys, values)

        def remove() -> torch.Tensor | None:
            self.before = None
            return index.remove()

        return replace(index, append=append, remove=remove)

    def select(self, queries: Queries, budget: Budget) -> Selection:
        if queries.joint:
            return self.inner.select(queries, budget)
        late, self.before = self.before or queries, queries
        chosen = self.inner.select(late, budget)
        # Logits that choosing computed are those of another query than is attended with.
        parts = () if chosen.rest is None else tuple(replace(part, scored=None) for part in chosen.rest.segments())
        return replace(chosen, rest=chosen.rest and replace(chosen.rest, segments=lambda: parts))


def _decode(layer: SmallLayer, sparse: SparseLayer) -> list[torch.Tensor]:
    """A question of three tokens, then one token a step."""
    facts, (Hk, G, _, D) = layer.context.facts, layer.queries.shape
    sparse.rewind()
    outputs = []
    for step, tokens in enumerate([3] + [1] * STEPS):
        keys, values, query = (
            normal(10 * step + part, heads, tokens, D) for part, heads in enumerate((Hk, Hk, Hk * G))
        )
        sparse.update(keys[None], values[None])
        call = AttentionCall(0, query, keys, values, facts.softmax_scale, facts.softcap, None, None)
        outputs.append(sparse.attend(call))
    return outputs


@pytest.mark.parametrize("method", METHODS)
def test_a_step_attends_to_what_the_one_before_asked_for(method: str) -> None:
    layer = small_layer(3, block=None if method == "squeezed" else 64)
    late = sparse_layer(layer, _Late(METHODS[method].prepare(layer.context)), Budget(9))
    ahead = sparse_layer(layer, METHODS[method].prepare(layer.context), Budget(9), ahead=True)
    at_once = sparse_layer(layer, METHODS[method].prepare(layer.context), Budget(9))
    expected = _decode(layer, late)
    for _ in range(2):
        for got, wanted in zip(_decode(layer, ahead), expected, strict=True):
            assert torch.equal(got, wanted)
        assert ahead.read.total() == late.read.total()
    assert not all(torch.equal(a, b) for a, b in zip(_decode(layer, at_once), expected, strict=True))
