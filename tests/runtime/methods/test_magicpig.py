"""MagicPIG: who collides with whom, how likely that was, and that what is drawn is right on average."""

from dataclasses import replace
from math import acos, comb, pi

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.estimates import double_logits
from support.random_tensors import normal
from support.reference import assert_close, reference_attention
from support.small_layer import SmallLayer, as_queries, small_layer, sparse_layer

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import LayerFacts
from sparsekv.kernels.attention.attention import causal_mask
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.attention.guard import check_estimates_missed
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.prepare import prepare_layer
from sparsekv.runtime.methods.magicpig import MagicPIG
from sparsekv.runtime.reporting.recall import MeasuredSetting, measure_layer, tail_block
from sparsekv.runtime.selection.interface import Budget, LayerPosition, MethodSpec, Selection

properties = settings(max_examples=10)
choices = pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])
FEW = MagicPIG(hash_bits=3, hash_tables=5)


def _spread(selection: Selection, values: torch.Tensor, middle: int) -> torch.Tensor:
    """[..., M]: of each token that was chosen its value [..., capacity], of others minus infinity."""
    places = torch.where(selection.rows.lengths > 0, selection.rows.starts, middle)
    room = torch.full((*values.shape[:-1], middle + 1), -torch.inf)
    return room.scatter(-1, places[:, None].expand_as(values), values)[..., :-1]


@properties
@given(seed=st.integers(0, 10**6), bits=st.integers(1, 15), tables=st.integers(2, 6))
def test_collisions_are_tables_in_which_all_signs_are_the_same(seed: int, bits: int, tables: int) -> None:
    layer = small_layer(seed, middle=30)
    selector = MagicPIG(hash_bits=bits, hash_tables=tables).prepare(layer.context)
    queries, keys = layer.queries[:, :, :4], layer.context.keys
    centred = keys.double() - keys.double().mean(1, keepdim=True)
    expected = torch.zeros(2, 3, 4, 30, dtype=torch.int16)
    for table in selector.projections.double():
        of_keys, of_queries = (rows.double() @ table > 0 for rows in (centred, queries))
        expected += (of_queries[:, :, :, None] == of_keys[:, None, None]).all(-1)
    assert torch.equal(selector.collisions(queries), expected)


@properties
@given(seed=st.integers(0, 10**6), bits=st.integers(1, 15), tables=st.integers(2, 150))
def test_the_probability_is_that_of_two_tables_or_more(seed: int, bits: int, tables: int) -> None:
    layer = small_layer(seed, middle=6)
    selector = MagicPIG(hash_bits=bits, hash_tables=tables).prepare(layer.context)
    query, keys = layer.queries[:1, :1, :1], layer.context.keys[:1].double()
    logs = selector.log_probability(layer.queries[:, :, :1], torch.arange(6).expand(2, 1, -1))[0, 0, 0].tolist()
    for centred, log in zip((keys - keys.mean(1, keepdim=True))[0], logs, strict=True):
        cosine = float(torch.cosine_similarity(query[0, 0, 0].double(), centred, 0))
        one = (1 - acos(cosine) / pi) ** bits
        drawn = sum(comb(tables, n) * one**n * (1 - one) ** (tables - n) for n in range(2, tables + 1))
        assert log == pytest.approx(float(torch.tensor(drawn).double().log()), abs=1e-3)


@choices
def test_a_group_reads_what_any_of_its_heads_drew_and_weighs_it_only_for_those(shared: bool) -> None:
    layer = small_layer(middle=60)
    selector = FEW.prepare(layer.context)
    queries = layer.queries[:, :, :2]
    drawn = selector.collisions(queries) >= 2
    selection = selector.select(as_queries(queries, joint=shared), Budget(59))
    assert selection.rows.log_weights is not None
    weights = _spread(selection, selection.rows.log_weights, 60)
    assert torch.equal(weights > -torch.inf, drawn)
    union = drawn.any(1).any(1, keepdim=True) if shared else drawn.any(1)
    assert 0 < int(union.sum()) < union.numel()
    assert torch.equal(selection.rows.lengths.sum(-1), union.sum(-1))
    everything = torch.arange(60).expand(2, 1, -1)
    assert_close(weights[drawn], -selector.log_probability(queries, everything)[drawn].double(), 1e-5)


def test_those_of_most_collisions_are_kept_where_more_are_drawn_than_the_budget() -> None:
    layer = small_layer(middle=60)
    selector = FEW.prepare(layer.context)
    found = selector.collisions(layer.queries).long()
    counts = (found * (found >= 2)).sum(1)
    assert int((counts > 0).sum(-1).min()) > 7
    selection = selector.select(as_queries(layer.queries), Budget(7))
    assert int(selection.rows.lengths.min()) == 1
    kept = counts.gather(-1, selection.rows.starts)
    assert torch.equal(kept.sort(-1).values, counts.sort(-1).values[..., -7:])


def _sums(layer: SmallLayer, method: MagicPIG, number: int) -> torch.Tensor:
    """[Hk, G, 1 + D] float64: numerator and denominator of the attention on the middle, of what one draw weighs."""
    context = replace(layer.context, position=LayerPosition(number, 1000))
    query = layer.queries[:, :, :1]
    selection = method.prepare(context).select(as_queries(query), Budget(layer.split.middle - 1))
    assert selection.rows.log_weights is not None
    weights = _spread(selection, selection.rows.log_weights, layer.split.middle)
    return _summed(layer, double_logits(query, context.keys, context.facts) + weights)


def _summed(layer: SmallLayer, logits: torch.Tensor) -> torch.Tensor:
    values = layer.values[:, layer.middle].double()
    rows = torch.cat([torch.ones(*values.shape[:2], 1), values], -1)
    return torch.einsum("hgt,htd->hgd", logits[:, :, 0].exp(), rows)


def test_numerator_and_denominator_are_right_on_average() -> None:
    """Over 600 draws of every layer's own projections, each sum within four standard errors of the truth."""
    layer = small_layer(middle=40, Hk=1, G=2, D=8)
    draws = torch.stack([_sums(layer, MagicPIG(hash_bits=2, hash_tables=6), number) for number in range(600)])
    truth = _summed(layer, double_logits(layer.queries[:, :, :1], layer.context.keys, layer.context.facts))
    error = draws.std(0) / len(draws) ** 0.5
    assert bool(((draws.mean(0) - truth).abs() <= 4 * error).all())
    assert float((error[..., 0] / truth[..., 0]).max()) < 0.05


def _weighted(
    selection: Selection,
    middle: tuple[torch.Tensor, torch.Tensor],
    outside: tuple[torch.Tensor, torch.Tensor],
    query: torch.Tensor,
    facts: LayerFacts,
) -> torch.Tensor:
    """Attention [Hk, G, Q, D] in float64 over the middle with the weights of a draw, and over the rows outside of it,
    the last of which are the queries' own."""
    assert selection.rows.log_weights is not None
    weights = _spread(selection, selection.rows.log_weights, middle[0].shape[1])
    seen = causal_mask(query.shape[2], outside[0].shape[1], None, query.device)
    beside = double_logits(query, outside[0], facts).masked_fill(~seen, -torch.inf)
    attended = torch.cat([double_logits(query, middle[0], facts) + weights, beside], -1).softmax(-1)
    return torch.einsum("hgqt,htd->hgqd", attended, torch.cat([middle[1], outside[1]], 1).double())


@pytest.mark.parametrize("queries", [1, 4])
def test_a_layer_attends_to_what_was_drawn_by_its_weights(queries: int) -> None:
    layer = small_layer(middle=60)
    sparse = sparse_layer(layer, FEW.prepare(layer.context), Budget(40))
    new = normal(1, 1, 2, queries, 16), normal(2, 1, 2, queries, 16)
    sparse.update(*new)
    query, facts = normal(3, 6, queries, 16), layer.context.facts
    output = sparse.attend(AttentionCall(0, query, new[0][0], new[1][0], facts.softmax_scale, None, None, None))
    grouped, (keys, values) = query.unflatten(0, (2, 3)), sparse.exact_rows()
    selection = sparse.plan.selector.select(as_queries(grouped, joint=queries > 1), Budget(40))
    middle = layer.context.keys, layer.values[:, layer.middle]
    assert_close(output, _weighted(selection, middle, (keys, values), grouped, facts).flatten(0, 1), 1e-5)


def test_a_report_measures_what_was_drawn_by_its_weights(index: OpenIndex) -> None:
    artifact, split = index.artifact, index.split
    one = MeasuredSetting(MethodSpec("magicpig", "", FEW), Budget(0.5))
    means = measure_layer(LayerRows(artifact, 0), [one], [tail_block(artifact, 0)])[one].means()

    (keys, values), facts, inside = artifact.context(0), artifact.manifest.layers[0], slice(4, 4 + split.middle)
    query = artifact.queries(0)["tail"][:, split.tail // 2 :].unflatten(0, (len(keys), -1))
    selection = prepare_layer(LayerRows(artifact, 0), MethodSpec("magicpig", "", FEW)).selector.select(
        as_queries(query), Budget(0.5)
    )
    outside = [torch.cat([rows[:, :4], rows[:, inside.stop :]], 1) for rows in (keys, values)]
    output = _weighted(selection, (keys[:, inside], values[:, inside]), (outside[0], outside[1]), query, facts)
    everything = reference_attention(
        query, keys, values, facts.softmax_scale, mask=causal_mask(query.shape[2], keys.shape[1], None, keys.device)
    )
    errors = (output - everything).norm(dim=-1) / everything.norm(dim=-1)
    assert float(errors.mean()) > 0.01
    assert_close(means["output_error"], errors.mean((1, 2)), 1e-4)
    read = 2 * selection.rows.lengths.sum(-1).double().mean(1) + selection.cost.index_rows
    assert_close(means["kv_fraction"], read / (2 * split.middle), 1e-6)


def test_no_guard_is_told_what_is_left() -> None:
    with pytest.raises(UsageError, match=r"--guard: magicpig cannot estimate how .* misses; use another method$"):
        check_estimates_missed("--guard", MethodSpec("magicpig", "", FEW, residual=True))


def test_a_seed_and_a_layer_have_projections_of_their_own() -> None:
    layer = small_layer(middle=20)
    second = replace(layer.context, position=LayerPosition(1, 2))
    first, again, other_seed, other_layer = (
        replace(FEW, hash_seed=seed).prepare(context).projections
        for seed, context in ((0, layer.context), (0, layer.context), (1, layer.context), (0, second))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other_seed)
    assert not torch.equal(first, other_layer)


@choices
def test_everything_is_attended_without_weights(shared: bool) -> None:
    layer = small_layer(middle=40)
    selection = FEW.prepare(layer.context).select(as_queries(layer.queries, joint=shared), Budget(1.0))
    assert selection.rows.log_weights is None
    assert torch.equal(selection.rows.starts.sort(-1).values, torch.arange(40).expand_as(selection.rows.starts))
    assert int(selection.rows.lengths.min()) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_codes_and_the_mean_key_are_read(dtype: torch.dtype) -> None:
    layer = small_layer(middle=80)
    context = replace(layer.context, load_keys=lambda: layer.context.keys.to(dtype))
    selection = MagicPIG(hash_bits=7, hash_tables=20).prepare(context).select(as_queries(layer.queries), Budget(9))
    assert selection.cost.index_rows == pytest.approx(80 * 7 * 20 / 8 / (16 * dtype.itemsize) + 1)


@pytest.mark.parametrize(
    ("option", "value"),
    [("hash_bits", 0), ("hash_bits", 16), ("hash_tables", 1), ("hash_tables", 32_768), ("hash_seed", -1)],
)
def test_tables_that_cannot_be_are_refused(option: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} {value}: give"):
        replace(FEW, **{option: value})
