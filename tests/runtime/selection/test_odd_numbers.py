"""A step of any method, asked with what is no number: it may answer anything, but reads nothing that is not there."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.configs import sparse
from support.odd_numbers import every_kind, few_kinds, logits_full_of, odd
from support.random_tensors import normal
from support.small_index import INDEXERS, build_small, random_ids, stepped_logits
from support.small_layer import as_queries

from sparsekv.formats.errors import SparsekvError
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.attention.guard import Guard
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import generate
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.prepare import stored_context
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, Method, Selection, methods

STORED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "huge": lambda rows: 3e38 * rows.sign(),
    "all equal": lambda rows: rows[:, :1].expand_as(rows).contiguous(),
}
"""Changes of stored rows that opening accepts, because all numbers are finite."""


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """A small index with every method that has one."""
    return build_small(tmp_path_factory.mktemp("odd") / "small.skv", tokens=200, methods=INDEXERS)


def assert_within(chosen: Selection, middle: int) -> None:
    ends = chosen.rows.starts + chosen.rows.lengths
    assert bool((chosen.rows.starts >= 0).all())
    assert bool((chosen.rows.lengths >= 0).all())
    assert bool((ends <= middle).all())
    taken = chosen.rows.lengths.sum(-1)
    assert bool((taken <= chosen.rows.capacity).all())
    assert chosen.rows.total is None or bool((taken == chosen.rows.total).all())


@pytest.mark.thinned
@few_kinds
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", methods())
def test_rows_that_are_chosen_are_the_middles(everything: OpenIndex, name: str, stored: str, kind: str) -> None:
    artifact, store = everything.artifact, STORED[stored]
    context = stored_context(LayerRows(artifact, 0), name)
    keys, values, middle = context.keys, context.load_values(), context.keys.shape[1]
    context = replace(
        context,
        load_keys=lambda: store(keys),
        tensors={key: store(one) if one.is_floating_point() else one for key, one in context.tensors.items()},
        load_values=lambda: store(values),
    )
    Hk, G, _, D = context.load_observed().shape
    for method in methods()[name].variants(artifact.manifest.methods.get(name)).values():
        selector = method.prepare(context)
        for queries, shared in ((1, False), (3, True)):
            query, exact = odd(kind, normal(0, Hk, G, queries, D), normal(1, Hk, G, queries))
            chosen = selector.select(as_queries(query, exact, joint=shared, first=190), Budget(0.1))
            assert_within(chosen, middle)
            if chosen.rest is not None:
                chosen.rest.segments()


STEPS: dict[str, tuple[Method, dict[str, Any]]] = {
    "one kernel": (Multipole(), {}),
    "guarded": (Squeezed("hierarchical"), {"guard": Guard(0.1)}),
    "by threshold": (Squeezed(selection="threshold"), {"gauge": True}),
    "centroids for the rest": (CSAttention(), {"residual": True}),
    "from files": (CSAttention(backoff=0.5), {"placement": "disk", "ahead": True}),
    "clusters that take tokens in": (Multipole(stream=True, buffer=3), {}),
    "lists that take tokens in": (CSAttention(stream=True, buffer=3), {}),
}


@pytest.mark.thinned
@every_kind
@pytest.mark.parametrize("step", STEPS)
@torch.inference_mode()
def test_a_question_and_steps_of_odd_queries_and_keys(everything: OpenIndex, step: str, kind: str) -> None:
    """Infinite and other odd queries and keys come from the layer before. New tokens with such keys are attended and
    taken in."""
    method, how = STEPS[step]
    name = next(name for name, known in methods().items() if type(method) is known)
    cache = everything.cache(sparse(name, method, Budget(0.1), **how))
    layer, facts = cache.stored_layers[0], everything.artifact.manifest.layers[0]
    heads, _, D = layer.exact_rows()[0].shape
    for queries in (5, 1, 1, 1):
        query, keys, values = odd(kind, normal(0, 2 * heads, queries, D), *normal(1, 2, heads, queries, D))
        layer.update(keys[None], values[None])
        call = AttentionCall(0, query, keys, values, facts.softmax_scale, facts.softcap, None, None)
        assert layer.attend(call).shape == query.shape
    cache.rewind()
    assert stepped_logits(everything, cache, random_ids(4), question=2).isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["best", "drawn"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_told_and_not_made_text(
    everything: OpenIndex, number: float, temperature: float
) -> None:
    cache, question = everything.cache(sparse("squeezed", Squeezed(), Budget(0.2))), question_ids(everything, "Why?")
    told = pytest.raises(SparsekvError, match=r"logits are not finite.*inspect --verify")
    with logits_full_of(everything.model, number), told:
        generate(everything, cache, question, Sampling(temperature=temperature))
