"""Loki: the principal components are those of the keys, and the rest of a logit counts as the mean key's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choices import assert_best
from support.estimates import double_logits, group_scores
from support.random_tensors import normal
from support.reference import assert_close
from support.small_layer import TAIL, all_chosen, as_queries, small_layer

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.methods.loki import Loki
from sparsekv.runtime.selection.interface import Budget

properties = settings(max_examples=10)
choices = pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])


def _projected(keys: torch.Tensor, dims: int) -> torch.Tensor:
    """Keys [Hk, M, D] as their first components show them, by a singular value decomposition: float64."""
    heads = []
    for rows in keys.double().numpy():
        centred = rows - rows.mean(0)
        directions = np.linalg.svd(centred)[2][:dims]
        heads.append(torch.from_numpy(rows.mean(0) + centred @ directions.T @ directions))
    return torch.stack(heads)


@properties
@given(
    seed=st.integers(0, 10**6),
    middle=st.integers(20, 120),
    dims=st.integers(1, 16),
    softcap=st.sampled_from([None, 2.0]),
)
def test_estimates_are_the_products_with_projected_keys(
    seed: int, middle: int, dims: int, softcap: float | None
) -> None:
    layer = small_layer(seed, middle=middle, softcap=softcap)
    estimates = Loki(dims=dims).prepare(layer.context).estimates(layer.queries)
    assert_close(
        estimates, double_logits(layer.queries, _projected(layer.context.keys, dims), layer.context.facts), 1e-4
    )


@choices
@pytest.mark.parametrize("dims", [3, 16], ids=["some", "all"])
def test_the_best_by_the_groups_estimated_probability_are_chosen(shared: bool, dims: int) -> None:
    """With all components these are the oracle's."""
    layer, exact = small_layer(middle=150), normal(7, 2, 3, TAIL)
    selector = Loki(dims=dims).prepare(layer.context)
    chosen = all_chosen(selector.select(as_queries(layer.queries, exact, joint=shared), Budget(20)), selector)
    keys = layer.context.keys if dims > 3 else _projected(layer.context.keys, dims)
    logits = double_logits(layer.queries, keys, layer.context.facts)
    assert_best(chosen, group_scores(logits, exact, shared=shared), 20)


def test_components_of_all_keys_the_directions_and_the_mean_are_read() -> None:
    layer = small_layer(middle=150)
    for dims in (3, 16):
        selection = Loki(dims=dims).prepare(layer.context).select(as_queries(layer.queries), Budget(9))
        assert selection.cost.index_rows == pytest.approx(150 * dims / 16 + dims + 1)


def test_keys_in_half_precision_are_rotated_in_float64_and_kept_as_they_came() -> None:
    layer = small_layer(middle=150)
    context = replace(layer.context, load_keys=lambda: layer.context.keys.bfloat16())
    selector = Loki(dims=4).prepare(context)
    assert selector.reduced.dtype == torch.bfloat16
    expected = double_logits(layer.queries, _projected(context.keys, 4), context.facts)
    assert_close(selector.estimates(layer.queries), expected, 1e-2)


def test_no_component_at_all_and_more_than_there_are_are_refused() -> None:
    with pytest.raises(UsageError, match="--dims 0: give at least 1"):
        Loki(dims=0)
    with pytest.raises(UsageError, match="--dims 17: the model's heads have 16 channels; give at most 16"):
        Loki(dims=17).prepare(small_layer().context)


def test_the_default_stands_for_all_components_of_smaller_heads() -> None:
    context = small_layer(middle=150).context
    half = replace(context, load_keys=lambda: context.keys[..., :8])
    assert Loki().prepare(half).reduced.shape == half.keys.shape
