"""SparQ: the channels of largest |q|, the paper's temperature, and the mean value with the share that alpha leaves."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choices import assert_best
from support.estimates import double_logits, group_scores
from support.random_tensors import normal
from support.reference import assert_close
from support.small_layer import TAIL, SmallLayer, all_chosen, as_queries, small_layer

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import LayerFacts
from sparsekv.kernels.attention.attention import Segment, attend
from sparsekv.runtime.methods.sparq import SparQ
from sparsekv.runtime.selection.interface import Budget, MiddleContext

properties = settings(max_examples=10)
choices = pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])


def _estimates(
    query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts, channels: int, *, shared: bool = False
) -> torch.Tensor:
    """[Hk, G, Q, M] float64, one KV head and query after the other."""
    Hk, _, Q, D = query.shape
    parts = query.double().clone()
    for head in range(Hk):
        for number in range(Q):
            asking = query[head] if shared else query[head, :, number : number + 1]
            sums = asking.double().abs().sum((0, 1)).tolist()
            left_out = sorted(range(D), key=lambda channel: -sums[channel])[channels:]
            parts[head, :, number, left_out] = 0
    temperature = (parts.abs().sum(-1, keepdim=True) / query.double().abs().sum(-1, keepdim=True)).sqrt()
    return double_logits(parts / temperature, keys, facts)


@choices
@properties
@given(seed=st.integers(0, 10**6), channels=st.integers(1, 16), softcap=st.sampled_from([None, 2.0]))
def test_estimates_are_from_the_groups_channels_at_the_papers_temperature(
    shared: bool, seed: int, channels: int, softcap: float | None
) -> None:
    layer = small_layer(seed, middle=60, softcap=softcap)
    selector = SparQ(channels=channels).prepare(layer.context)
    expected = _estimates(layer.queries, layer.context.keys, layer.context.facts, channels, shared=shared)
    assert_close(selector.estimates(layer.queries, shared=shared), expected, 1e-5)


@choices
@pytest.mark.parametrize("channels", [4, 16], ids=["some", "all"])
def test_the_best_by_the_groups_estimated_probability_are_chosen(shared: bool, channels: int) -> None:
    """With all channels these are the oracle's."""
    layer, exact = small_layer(middle=150), normal(7, 2, 3, TAIL)
    selector = SparQ(channels=channels).prepare(layer.context)
    chosen = all_chosen(selector.select(as_queries(layer.queries, exact, joint=shared), Budget(20)), selector)
    logits = double_logits(layer.queries, layer.context.keys, layer.context.facts)
    if channels == 4:
        logits = _estimates(layer.queries, layer.context.keys, layer.context.facts, 4, shared=shared)
    assert_best(chosen, group_scores(logits, exact, shared=shared), 20)


def _with_values(layer: SmallLayer) -> MiddleContext:
    return replace(layer.context, load_values=lambda: layer.values[:, layer.middle])


def _outside(layer: SmallLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of sinks and tail."""
    keys, values = (
        torch.cat([rows[:, : layer.middle.start], rows[:, layer.middle.stop :]], 1)
        for rows in (layer.keys, layer.values)
    )
    return keys, values


def test_of_one_query_head_the_mean_value_has_the_share_that_alpha_leaves() -> None:
    """The paper's alpha o + (1 - alpha) v, with all that is attended exactly counted in alpha."""
    layer = small_layer(middle=120, G=1)
    facts, (keys, values) = layer.context.facts, _outside(layer)
    query = layer.queries[:, :, :1]
    beside = double_logits(query, keys, facts)
    selector = SparQ(channels=5, mean_value=True).prepare(_with_values(layer))
    selection = selector.select(as_queries(query, beside.logsumexp(-1).float()), Budget(12))

    estimates = torch.cat([_estimates(query, layer.context.keys, facts, 5), beside], -1).softmax(-1)
    everything = torch.cat([double_logits(query, layer.context.keys, facts), beside], -1)
    kept = torch.ones_like(everything, dtype=torch.bool)
    kept[..., :120] = torch.zeros_like(kept[..., :120]).scatter(-1, selection.rows.starts[:, None], True)
    alpha = (estimates * kept).sum(-1, keepdim=True)
    middle_values = layer.values[:, layer.middle].double()
    attended = everything.masked_fill(~kept, -torch.inf).softmax(-1)
    output = torch.einsum("hgqt,htd->hgqd", attended, torch.cat([middle_values, values.double()], 1))
    expected = alpha * output + (1 - alpha) * middle_values.mean(1)[:, None, None]

    assert float((1 - alpha).min()) > 0.05
    rows = selection.rows.starts[:, 0, :, None].expand(-1, -1, 16)
    chosen = Segment(layer.context.keys.gather(1, rows), layer.values[:, layer.middle].gather(1, rows))
    stands_in = [Segment(one.keys, one.values, bias=one.log_counts[:, None]) for one in selection.attended_segments()]
    actual = attend(query, [chosen, Segment(keys, values), *stands_in], facts.softmax_scale, facts.softcap)
    assert_close(actual, expected, 1e-5)


@choices
def test_a_group_has_one_weight_the_mean_of_its_heads(shared: bool) -> None:
    layer, exact = small_layer(middle=120), normal(3, 2, 3, TAIL)
    context = _with_values(layer)
    whole = SparQ(channels=5, mean_value=True).prepare(context)
    selection = whole.select(as_queries(layer.queries, exact, joint=shared), Budget(12))
    (rest,) = selection.attended_segments()
    mean_key = layer.context.keys.double().mean(1, keepdim=True)
    assert_close(rest.keys, mean_key, 1e-6)
    assert_close(rest.values, layer.values[:, layer.middle].double().mean(1, keepdim=True), 1e-6)
    estimates = _estimates(layer.queries, layer.context.keys, layer.context.facts, 5, shared=shared)
    logits = double_logits(layer.queries, layer.context.keys, layer.context.facts)
    places = selection.rows.starts[:, None].expand(2, 3, TAIL, -1)
    chosen = torch.zeros_like(estimates, dtype=torch.bool).scatter(-1, places, True)
    beside = exact.double()[..., None].exp()
    left = (estimates.exp() * ~chosen).sum(-1, keepdim=True)
    share = left / (left + (estimates.exp() * chosen).sum(-1, keepdim=True) + beside)
    wanted = share / (1 - share) * ((logits.exp() * chosen).sum(-1, keepdim=True) + beside)
    of_mean = double_logits(layer.queries, mean_key, layer.context.facts)
    assert_close(rest.log_counts, (wanted.log() - of_mean).mean(1), 1e-5)


def test_nothing_is_left_to_the_mean_value_where_everything_is_chosen() -> None:
    layer = small_layer(middle=50)
    selector = SparQ(mean_value=True).prepare(_with_values(layer))
    selection = selector.select(as_queries(layer.queries, normal(1, 2, 3, TAIL)), Budget(1.0))
    assert bool((selection.attended_segments()[0].log_counts == -torch.inf).all())


def test_channels_of_all_keys_and_two_mean_rows_are_read() -> None:
    layer = small_layer(middle=80)
    for channels in (4, 16):
        selections = [
            SparQ(channels=channels, mean_value=mean)
            .prepare(_with_values(layer))
            .select(as_queries(layer.queries), Budget(9))
            for mean in (False, True)
        ]
        scanned = 80 * channels / 16
        assert [one.cost.index_rows for one in selections] == [scanned, scanned + 2]


def test_no_channel_at_all_and_more_than_there_are_are_refused() -> None:
    with pytest.raises(UsageError, match="--channels 0: give at least 1"):
        SparQ(channels=0)
    with pytest.raises(UsageError, match="--channels 17: the model's heads have 16 channels; give at most 16"):
        SparQ(channels=17).prepare(small_layer().context)
