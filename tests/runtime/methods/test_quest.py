"""QUEST: its bound is a bound, its pages are whole, and exactly the budget is chosen."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import assert_close
from support.small_layer import all_chosen, as_queries, small_layer

from sparsekv.formats.errors import UsageError
from sparsekv.kernels.common.row_operations import expand_runs
from sparsekv.kernels.scores.logits import scores_from_logits
from sparsekv.runtime.methods.oracle import OracleSelector
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.selection.interface import Budget

properties = settings(max_examples=20)
pages = st.integers(1, 40)


@properties
@given(
    seed=st.integers(0, 10**6),
    middle=st.integers(5, 120),
    page_size=pages,
    softcap=st.sampled_from([None, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_logit_of_a_page_is_above_its_bound(
    seed: int, middle: int, page_size: int, softcap: float | None, dtype: torch.dtype
) -> None:
    layer = small_layer(seed, middle=middle, softcap=softcap)
    context = replace(layer.context, load_keys=lambda: layer.context.keys.to(dtype))
    queries = layer.queries.to(dtype)
    bounds = Quest(page_size=page_size).prepare(context).bounds(queries).double()
    logits = context.facts.softmax_scale * torch.einsum("hgqd,hmd->hgqm", queries.double(), context.keys.double())
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    assert bounds.shape[-1] == -(-middle // page_size)
    of_token = bounds.repeat_interleave(page_size, -1)[..., :middle]
    # What a sum of 16 products in float32 may round off; the bound itself is exact for a page of equal keys.
    assert bool((logits <= of_token + 1e-5).all())


@pytest.mark.parametrize("middle", [32, 37], ids=["whole pages", "a short last page"])
def test_bounds_are_the_sums_of_each_channels_extreme_over_the_pages_own_keys(middle: int) -> None:
    layer = small_layer(middle=middle)
    bounds = Quest(page_size=16).prepare(layer.context).bounds(layer.queries)
    products = layer.queries.double()[:, :, :, None] * layer.context.keys.double()[:, None, None]
    expected = torch.stack([page.amax(3).sum(-1) for page in products.split(16, 3)], -1)
    assert_close(bounds, layer.context.facts.softmax_scale * expected, 1e-5)


@properties
@given(seed=st.integers(0, 10**6), middle=st.integers(5, 120), page_size=pages, budget=st.integers(1, 150))
@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])
def test_whole_pages_are_taken_and_the_last_one_from_its_start(
    shared: bool, seed: int, middle: int, page_size: int, budget: int
) -> None:
    layer = small_layer(seed, middle=middle)
    selector = Quest(page_size=page_size).prepare(layer.context)
    selection = selector.select(as_queries(layer.queries, joint=shared), Budget(budget))
    assert selection.rows.starts.shape[1] == (1 if shared else layer.queries.shape[2])
    for of_head in all_chosen(selection, selector):
        for tokens in of_head:
            assert len(tokens) == len(set(tokens)) == min(budget, middle)
            chosen = list(dict.fromkeys(token // page_size for token in tokens))
            whole = [token for page in chosen for token in range(page * page_size, min(middle, (page + 1) * page_size))]
            assert tokens == whole[: len(tokens)]


def test_pages_of_one_token_choose_what_the_oracle_does() -> None:
    layer = small_layer(middle=80)
    quest, oracle = Quest(page_size=1).prepare(layer.context), OracleSelector(layer.context)
    chosen = [
        all_chosen(selector.select(as_queries(layer.queries), Budget(9)), selector) for selector in (quest, oracle)
    ]
    assert [[set(tokens) for tokens in head] for head in chosen[0]] == [
        [set(tokens) for tokens in head] for head in chosen[1]
    ]


def test_a_short_last_page_weighs_as_many_tokens_as_it_has() -> None:
    """The score of a page is the mean over a group's heads of what a token of it gets, if each token had its bound."""
    for seed in range(10):
        layer = small_layer(seed, middle=16 * 4 + 1)
        keys = layer.context.keys.clone()
        keys[:, -1] *= 4  # which many heads attend to
        selector = Quest(page_size=16).prepare(replace(layer.context, load_keys=lambda keys=keys: keys))
        scores = selector.bounds(layer.queries).double().repeat_interleave(16, -1)[..., :65].softmax(-1).mean(1)
        starts = selector.select(as_queries(layer.queries), Budget(32)).rows.starts
        found = scores.gather(2, starts)
        assert bool((found.diff(dim=2) <= 1e-6).all())


@pytest.mark.gpu
def test_a_question_beside_others_chooses_what_it_does_alone() -> None:
    for seed in range(10):
        layer = small_layer(seed, middle=31)
        context = replace(layer.context, load_keys=lambda layer=layer: layer.context.keys.cuda())
        selector, queries = Quest(page_size=3).prepare(context), layer.queries.cuda()
        beside = selector.select(as_queries(queries), Budget(7)).rows
        for number in range(queries.shape[2]):
            alone = selector.select(as_queries(queries[:, :, [number]]), Budget(7)).rows.lengths[:, 0]
            lengths = torch.zeros_like(alone).scatter_(
                1, beside.starts[:, number] // 3, beside.lengths[:, number].int()
            )
            assert torch.equal(lengths, alone)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("budget", [1, 100, 200, 333])
def test_kernels_choose_pages_of_the_highest_bounds(budget: int, softcap: float | None, dtype: torch.dtype) -> None:
    """As far as scores are told apart: by one part in 128, and none below 2 ** -15 of the budget's share of all."""
    layer = small_layer(middle=333, D=64, softcap=softcap)
    context, query = (
        replace(layer.context, load_keys=lambda: layer.context.keys.to(dtype).cuda()),
        layer.queries[:, :, :1].to(dtype),
    )
    selector = Quest(page_size=16).prepare(context)
    selection = selector.select(as_queries(query.cuda()), Budget(budget))
    assert selection.rows.indices is not None
    assert selection.rows.total == min(budget, 333)
    lengths, of_pages = selection.rows.lengths[:, 0].cpu(), selector.lengths.cpu()
    scores = scores_from_logits(selector.bounds(query.cuda()).cpu(), of_pages[:, None, None])[:, 0]
    members, _ = expand_runs(selector.starts.cpu(), lengths, budget)
    assert torch.equal(selection.rows.indices.rows.cpu()[:, :budget].sort(-1).values, members.sort(-1).values.int())
    assert selection.rows.indices.used.tolist() == [min(budget, 333)] * 2
    assert lengths.sum(-1).tolist() == [min(budget, 333)] * 2
    assert bool((lengths <= of_pages).all())
    for of_head, found, whole in zip(scores, lengths, of_pages, strict=True):
        taken, left = of_head[found > 0], of_head[found == 0]
        assert int(((found > 0) & (found < whole)).sum()) <= 1
        assert not len(left) or left.max() <= taken.min() * (1.001 + 2**-7) + 2.0**-15 / budget


def test_two_rows_are_read_for_each_page() -> None:
    layer = small_layer(middle=50)
    selector = Quest().prepare(layer.context)
    selection = selector.select(as_queries(layer.queries), Budget(16))
    assert selection.cost.index_rows == 2 * 4


def test_a_page_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="--page-size 0"):
        Quest(page_size=0)
