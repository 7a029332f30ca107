"""KeyDiff keeps the keys that point away from the mean direction, whoever asks."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choices import assert_best
from support.small_layer import all_chosen, as_queries, small_layer

from sparsekv.runtime.methods.keydiff import KeyDiff
from sparsekv.runtime.selection.interface import Budget

properties = settings(max_examples=20)


@properties
@given(
    seed=st.integers(0, 10**6),
    middle=st.integers(5, 90),
    budget=st.integers(1, 100),
    shared=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_keys_of_the_lowest_cosine_with_the_mean_direction_are_kept(
    seed: int, middle: int, budget: int, shared: bool, dtype: torch.dtype
) -> None:
    layer = small_layer(seed, middle=middle)
    keys = layer.context.keys.to(dtype)
    selector = KeyDiff().prepare(replace(layer.context, load_keys=lambda: keys))
    selection = selector.select(as_queries(layer.queries, joint=shared), Budget(budget))
    unit = keys.double() / keys.double().norm(dim=-1, keepdim=True)
    mean = unit.mean(1)
    cosines = torch.einsum("hmd,hd->hm", unit, mean / mean.norm(dim=-1, keepdim=True))
    queries = 1 if shared else layer.queries.shape[2]
    assert_best(all_chosen(selection, selector), -cosines[:, None].expand(-1, queries, -1), min(budget, middle))
    assert selection.cost.index_rows == 0


def test_the_length_of_a_key_does_not_matter() -> None:
    layer = small_layer(middle=40)
    lengths = torch.linspace(0.1, 9, 40)[:, None]
    contexts = (layer.context, replace(layer.context, load_keys=lambda: lengths * layer.context.keys))
    selectors = [KeyDiff().prepare(context) for context in contexts]
    chosen = [all_chosen(one.select(as_queries(layer.queries), Budget(6)), one) for one in selectors]
    assert chosen[0] == chosen[1]


def test_a_key_against_all_others_is_the_first_that_is_kept() -> None:
    layer = small_layer(middle=30)
    keys = layer.context.keys.abs()
    keys[:, 17] *= -1
    selector = KeyDiff().prepare(replace(layer.context, load_keys=lambda: keys))
    chosen = all_chosen(selector.select(as_queries(layer.queries, joint=True), Budget(1)), selector)
    assert chosen == [[[17]], [[17]]]
