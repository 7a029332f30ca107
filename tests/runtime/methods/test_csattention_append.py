"""CSAttention while new keys enter the lists."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.reference import assert_close
from support.small_layer import SINKS, as_queries
from support.small_tables import SMALL, layer_input, tabled_layer

from sparsekv.indexing.methods.csattention import CSAttentionIndexer
from sparsekv.kernels.posting_lists.posting_lists import split_channels
from sparsekv.runtime.methods.csattention import NEW_CENTROIDS, CSAttention, TableSelector
from sparsekv.runtime.selection.interface import Budget, MiddleContext

properties = settings(max_examples=15)
EXACT = CSAttentionIndexer(subspace_size=16, centroids=40, alpha=1.0, query_sample=64)


def _lists(selector: TableSelector) -> tuple[torch.Tensor, ...]:
    return selector.tables.tokens, selector.tables.scores


def _coarse(rows: torch.Tensor, steps: int) -> torch.Tensor:
    """Numbers of few bits, whose products no order of summation rounds."""
    return (rows * steps).round() / steps


@properties
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_however_new_keys_are_taken_in_the_lists_are_the_same(seed: int, cuts: list[int]) -> None:
    """And they are those of the highest scores over all keys, as far as their length goes."""
    given = layer_input(seed)
    coarse = replace(given, keys=_coarse(given.keys, 4))
    built = SMALL.build_layer(coarse)
    tensors = SMALL.append_layer(built | {"centroids": _coarse(built["centroids"], 8)}, coarse, 60)
    load = (lambda: coarse.keys), (lambda: coarse.values), (lambda: coarse.queries)
    context = MiddleContext(*load, coarse.facts, tensors, {}, first_token=SINKS)
    new = _coarse(normal(seed + 9, 2, 40, 16), 4)
    pieces = [piece for piece in torch.arange(40).tensor_split(sorted(cuts)) if len(piece)]
    in_pieces, at_once = (TableSelector(context) for _ in range(2))
    for piece in pieces:
        appended = in_pieces.append_tokens(new[:, piece], new[:, piece])
        assert torch.equal(appended.order, torch.arange(len(piece)).expand(2, -1))
    at_once.append_tokens(new, new)
    for rows, others in zip(_lists(in_pieces), _lists(at_once), strict=True):
        assert torch.equal(rows, others)
    assert_close(in_pieces.tables.key_mean, at_once.tables.key_mean, 1e-5)
    keys = split_channels(torch.cat([coarse.keys, new], 1), at_once.tables.channels)
    scores = (at_once.tables.centroids @ keys.transpose(-1, -2)).half().float()
    tokens = at_once.tables.tokens.long() - at_once.tables.first_token
    assert torch.equal(scores.gather(-1, tokens), at_once.tables.scores.float())
    assert torch.equal(at_once.tables.scores.float().sort(-1).values, scores.topk(tokens.shape[-1], -1).values.flip(-1))
    assert_close(at_once.tables.key_mean, keys.mean(2), 1e-5)
    assert at_once.open_row == at_once.tables.keys == 100


def test_what_was_taken_in_is_forgotten() -> None:
    layer = tabled_layer().layer
    selector, fresh = (CSAttention(stream=True).prepare(layer.context) for _ in range(2))
    new = 3 * normal(9, 2, 30, 16)
    selector.append_tokens(new, new)
    after = selector.select(as_queries(layer.queries), Budget(9)).rows.starts
    assert int(after.max()) >= 60
    order = selector.remove_appended()
    assert order is not None
    assert order.shape == (2, 0)
    assert selector.open_row == 60
    first, again = (one.select(as_queries(layer.queries), Budget(9)) for one in (fresh, selector))
    assert torch.equal(first.rows.starts, again.rows.starts)


def test_queries_that_came_with_new_keys_have_lists_of_their_own() -> None:
    layer = tabled_layer().layer
    selector = CSAttention(stream=True).prepare(layer.context)
    before, new = selector.tables, normal(9, 2, 30, 16)
    for query in layer.queries.split(1, 2):
        selector.select(as_queries(query), Budget(9))
    selector.append_tokens(new, new)
    after, old = selector.tables, before.centroids.shape[2]
    assert after.centroids.shape[2] == old + NEW_CENTROIDS
    assert torch.equal(after.centroids[:, :, :old], before.centroids)
    assert torch.allclose(after.centroids[:, :, old:].norm(dim=-1), torch.ones(()), atol=1e-2)
    keys = split_channels(torch.cat([layer.context.keys, new], 1), after.channels)
    scores = (after.centroids[:, :, old:] @ keys.transpose(-1, -2)).half().float()
    tokens = after.tokens[:, :, old:].long() - after.first_token
    assert_close(scores.gather(-1, tokens), after.scores[:, :, old:].float(), 1e-3)
    best = scores.topk(tokens.shape[-1], -1).values.flip(-1)
    assert_close(after.scores[:, :, old:].float().sort(-1).values, best, 1e-3)
    selector.append_tokens(new, new)
    assert selector.tables.centroids.shape[2] == old + NEW_CENTROIDS
    selector.remove_appended()
    assert selector.tables.centroids.shape[2] == old
