"""The cache's layers: attention over exactly the rows that were chosen, growth, rewinding, what is counted."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.reference import assert_close, reference_attention
from support.small_layer import SmallLayer, all_chosen, as_queries, small_layer, sparse_layer

from sparsekv.kernels.attention.attention import causal_mask
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.kv_store import lay_out
from sparsekv.runtime.cache.stored_layer import FIRST_NEW_ROWS, DenseLayer, StoredLayer
from sparsekv.runtime.methods.keydiff import KeyDiff
from sparsekv.runtime.methods.loki import Loki
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.sparq import SparQ
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.tidaldecode import TidalDecode
from sparsekv.runtime.methods.window import Window
from sparsekv.runtime.selection.interface import Budget, Method

METHODS = {
    "squeezed": Squeezed("flat"),
    "hierarchical": Squeezed("hierarchical"),
    "threshold": Squeezed("hierarchical", "threshold"),
    "quest": Quest(page_size=7),
    "oracle": Oracle(),
    "window": Window(),
    "snapkv": SnapKV(window_queries=3),
    "keydiff": KeyDiff(),
    "tidaldecode": TidalDecode(),
    "sparq": SparQ(channels=5),
    "loki": Loki(dims=5),
}
HEADS, GROUP, SIZE = 2, 3, 16


def _append(layer: StoredLayer, seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (normal(seed + part, 1, HEADS, tokens, SIZE) for part in (0, 1))
    layer.update(keys, values)
    return keys[0], values[0]


def _append_all(
    stored: StoredLayer, layer: SmallLayer, seed: int, steps: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values [Hk, N + new, D] after new ones came in steps."""
    parts = [(layer.keys, layer.values), *(_append(stored, seed + 2 * n, step) for n, step in enumerate(steps))]
    return torch.cat([keys for keys, _ in parts], 1), torch.cat([values for _, values in parts], 1)


def _call(layer: SmallLayer, query: torch.Tensor, window: int | None, sinks: torch.Tensor | None) -> AttentionCall:
    facts, new = layer.context.facts, layer.keys[:, :0]  # a layer reads its own rows
    return AttentionCall(0, query, new, new, facts.softmax_scale, facts.softcap, window, sinks)


def _sparse(layer: SmallLayer, method: Method, budget: Budget) -> SparseLayer:
    selector = method.prepare(layer.context)
    return sparse_layer(layer, selector, budget)


def _attended(
    layer: SmallLayer, sparse: SparseLayer, query: torch.Tensor, new: int, sinks: torch.Tensor | None
) -> torch.Tensor:
    """[Hk, Q, N + new]: what queries, the last of the new tokens, attend to, by the selector's choice."""
    queries, tokens = query.shape[2], layer.split.tokens
    facts = layer.context.facts

    keys, _ = sparse.exact_rows()
    logits = facts.softmax_scale * torch.einsum("hgqd,htd->hgqt", query.double(), keys.double())
    if facts.softcap is not None:
        logits = facts.softcap * torch.tanh(logits / facts.softcap)
    exact = logits.masked_fill(~causal_mask(queries, keys.shape[1], None, keys.device), -torch.inf).logsumexp(-1)
    exact = exact if sinks is None else torch.logaddexp(exact, sinks[..., None].double())
    selection = sparse.plan.selector.select(
        as_queries(query, exact, joint=queries > 1, first=tokens + new - queries), sparse.plan.budget
    )
    mask = causal_mask(queries, tokens + new, None, query.device).repeat(HEADS, 1, 1)
    mask[:, :, layer.middle] = False
    for head, of_head in enumerate(all_chosen(selection, sparse.plan.selector)):
        for number, chosen in enumerate(of_head):
            rows = torch.tensor(chosen, dtype=torch.int64) + layer.split.sinks
            mask[head, number if len(of_head) > 1 else slice(None), rows] = True
    return mask


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    before=st.integers(0, 5),
    queries=st.sampled_from([1, 6]),
    budget=st.builds(Budget, st.integers(1, 150) | st.floats(0.02, 1.0)),
    softcap=st.sampled_from([None, 3.0]),
    has_sinks=st.booleans(),
)
def test_attention_is_over_the_chosen_rows_and_the_exact_ones_alone(
    method: Method, seed: int, before: int, queries: int, budget: Budget, softcap: float | None, has_sinks: bool
) -> None:
    layer = small_layer(seed, middle=100, softcap=softcap)
    sparse = _sparse(layer, method, budget)
    keys, values = _append_all(sparse, layer, seed + 10, [before, queries])
    query = normal(seed + 30, HEADS, GROUP, queries, SIZE)
    sinks = normal(seed + 40, HEADS, GROUP) if has_sinks else None
    output = sparse.attend(_call(layer, query.flatten(0, 1), None, None if sinks is None else sinks.flatten()))
    expected = reference_attention(
        query,
        keys,
        values,
        layer.context.facts.softmax_scale,
        mask=_attended(layer, sparse, query, before + queries, sinks)[:, None],
        softcap=softcap,
        sink_logits=sinks,
    )
    assert_close(output, expected.flatten(0, 1), 1e-5)


@pytest.mark.parametrize("name", ["squeezed", "threshold", "oracle", "keydiff", "tidaldecode", "sparq", "loki"])
def test_the_order_of_the_middles_tokens_does_not_matter(name: str) -> None:
    """The same clusters over permuted tokens: what is attended, and so the output, stays the same."""
    layer = small_layer(middle=100)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    moved = torch.cat([torch.arange(3), 3 + order, torch.arange(103, layer.split.tokens)])
    place = order.argsort()
    tensors = layer.context.tensors | {"token_order": place[layer.context.tensors["token_order"].long()]}
    permuted = replace(
        layer,
        keys=layer.keys[:, moved],
        values=layer.values[:, moved],
        context=replace(layer.context, load_keys=lambda: layer.context.keys[:, order], tensors=tensors),
    )
    query = layer.queries[:, :, 0].flatten(0, 1)[:, None]
    outputs = []
    for one in (layer, permuted):
        sparse = _sparse(one, METHODS[name], Budget(17))
        _append(sparse, 0, 1)
        outputs.append(sparse.attend(_call(one, query, None, None)))
    assert_close(outputs[1], outputs[0], 1e-5)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize(
    "steps", [[1] * 3, [FIRST_NEW_ROWS], [FIRST_NEW_ROWS - 1, 1, 1], [200, 3 * FIRST_NEW_ROWS, 1]], ids=str
)
def test_new_rows_survive_every_growth_of_the_buffer(kind: str, steps: list[int]) -> None:
    layer = small_layer(middle=40)
    stored = _sparse(layer, Oracle(), Budget(1.0)) if kind == "sparse" else DenseLayer(layer.keys, layer.values)
    all_keys, all_values = _append_all(stored, layer, 0, steps)
    exact = torch.ones(all_keys.shape[1], dtype=torch.bool)
    exact[layer.middle if kind == "sparse" else slice(layer.split.tokens)] = False
    keys, values = stored.exact_rows()
    assert torch.equal(keys, all_keys[:, exact])
    assert torch.equal(values, all_values[:, exact])
    assert stored.get_seq_length() == layer.split.tokens + sum(steps)
    assert stored.get_mask_sizes(2) == (layer.split.tokens + sum(steps) + 2, 0)


@pytest.mark.parametrize("name", METHODS)
def test_a_rewound_layer_answers_like_a_fresh_one(name: str) -> None:
    layer = small_layer(middle=100)
    query, earlier = (layer.queries[:, :, number].flatten(0, 1)[:, None] for number in (0, 1))
    used, fresh = (_sparse(layer, METHODS[name], Budget(20)) for _ in range(2))
    _append(used, 1, 300)
    used.attend(_call(layer, earlier, None, None))
    used.rewind()
    for sparse in (used, fresh):
        _append(sparse, 2, 1)
    outputs = [sparse.attend(_call(layer, query, None, None)) for sparse in (used, fresh)]
    assert torch.equal(*outputs)
    assert used.get_seq_length() == fresh.get_seq_length() == layer.split.tokens + 1
    assert IndexCache([used]).kv_fraction() == IndexCache([fresh]).kv_fraction()


@settings(max_examples=15)
@given(
    window=st.none() | st.integers(1, 80),
    before=st.integers(0, 60),
    queries=st.sampled_from([1, 5]),
    seed=st.integers(0, 1000),
)
def test_a_dense_layer_attends_to_all_that_its_window_leaves(
    window: int | None, before: int, queries: int, seed: int
) -> None:
    layer = small_layer(seed, middle=15)
    out_of_sight = 0 if window is None else max(0, layer.split.tokens - window + 1)
    dense = DenseLayer(layer.keys[:, out_of_sight:], layer.values[:, out_of_sight:], out_of_sight)
    keys, values = _append_all(dense, layer, seed, [before, queries])
    query = normal(seed + 9, HEADS, GROUP, queries, SIZE)
    output = dense.attend(_call(layer, query.flatten(0, 1), window, None))
    mask = causal_mask(queries, layer.split.tokens + before + queries, window, keys.device)
    expected = reference_attention(query, keys, values, layer.context.facts.softmax_scale, mask=mask)
    assert_close(output, expected.flatten(0, 1), 1e-5)


def test_kv_fraction_counts_the_rows_of_decode_steps_and_of_the_index() -> None:
    layer = small_layer(middle=100, levels=(0.2, 0.05))
    sparse = _sparse(layer, Squeezed(), Budget(30))
    cache = IndexCache([sparse, DenseLayer(layer.keys, layer.values)])
    assert cache.kv_fraction() == 0
    for tokens in (4, 1, 1):
        _append(sparse, tokens, tokens)
        query = normal(tokens, HEADS * GROUP, tokens, SIZE)
        sparse.attend(_call(layer, query, None, None))
    # 30 keys and values and 20 centroids of 100 keys and values; the question's four tokens are no decode step.
    assert cache.kv_fraction() == pytest.approx((2 * 30 + 20) / (2 * 100))
    assert sparse.read.dense == 2 * (2 * HEADS * 100)


def test_rows_are_laid_out_cluster_by_cluster() -> None:
    layer = small_layer(middle=50)
    order = layer.context.tensors["token_order"].long()
    laid_out = lay_out(layer.context.keys, order)
    assert laid_out.is_contiguous()
    for head in range(HEADS):
        assert torch.equal(laid_out[head], layer.context.keys[head, order[head]])
    assert torch.equal(lay_out(layer.context.keys, None), layer.context.keys)
