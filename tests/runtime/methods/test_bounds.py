"""The two bounds: the oracle, above which no choice of as many tokens keeps more, and the window, which keeps none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.reference import attention_probabilities
from support.small_layer import SmallLayer, all_chosen, as_queries, small_layer

from sparsekv.runtime.methods.keydiff import KeyDiff
from sparsekv.runtime.methods.loki import Loki
from sparsekv.runtime.methods.magicpig import MagicPIG
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.sparq import SparQ
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.window import Window
from sparsekv.runtime.selection.interface import Budget, Method, Selection, Selector

properties = settings(max_examples=15)
CHOICES = [
    Squeezed("flat"),
    Squeezed("hierarchical"),
    Quest(),
    Quest(page_size=3),
    Window(),
    SnapKV(),
    KeyDiff(),
    SparQ(channels=4),
    Loki(dims=4),
    MagicPIG(hash_bits=4, hash_tables=10),
]


def _probability(layer: SmallLayer, exact: torch.Tensor) -> torch.Tensor:
    """[Hk, Q, M] float64: the group's mean probability of each middle token, beside exact rows of some weight."""
    facts = layer.context.facts
    middle = attention_probabilities(
        layer.queries, layer.context.keys, facts.softmax_scale, softcap=facts.softcap, sink_logits=None
    )
    logits = torch.einsum("hgqd,hmd->hgqm", layer.queries.double(), layer.context.keys.double()) * facts.softmax_scale
    if facts.softcap is not None:
        logits = facts.softcap * torch.tanh(logits / facts.softcap)
    total = logits.logsumexp(-1)
    return (middle * (total - torch.logaddexp(total, exact.double())).exp()[..., None]).mean(1)


def _select(
    layer: SmallLayer, method: Method, budget: Budget, exact: torch.Tensor, shared: bool
) -> tuple[Selection, Selector]:
    selector = method.prepare(layer.context)
    return selector.select(as_queries(layer.queries, exact, joint=shared), budget), selector


def _mass(layer: SmallLayer, exact: torch.Tensor, chosen: list[list[list[int]]], shared: bool) -> torch.Tensor:
    probability = _probability(layer, exact)
    probability = probability.mean(1, keepdim=True) if shared else probability
    return torch.tensor(
        [
            [float(probability[head, query, tokens].sum()) for query, tokens in enumerate(of_head)]
            for head, of_head in enumerate(chosen)
        ]
    )


@properties
@given(
    seed=st.integers(0, 10**6),
    budget=st.integers(1, 120),
    softcap=st.sampled_from([None, 3.0]),
    shared=st.booleans(),
)
def test_no_choice_of_as_many_tokens_has_more_mass_than_the_oracles(
    seed: int, budget: int, softcap: float | None, shared: bool
) -> None:
    layer = small_layer(seed, middle=100, softcap=softcap)
    exact = 2 * normal(seed, *layer.queries.shape[:3])
    best = all_chosen(*_select(layer, Oracle(), Budget(budget), exact, shared))
    assert all(len(set(tokens)) == min(budget, 100) for of_head in best for tokens in of_head)
    most = _mass(layer, exact, best, shared)
    for method in CHOICES:
        chosen = all_chosen(*_select(layer, method, Budget(budget), exact, shared))
        assert all(len(tokens) <= min(budget, 100) for of_head in chosen for tokens in of_head)
        assert bool((_mass(layer, exact, chosen, shared) <= most + 1e-6).all())


@properties
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 60))
def test_the_oracle_takes_the_tokens_of_highest_probability(seed: int, budget: int) -> None:
    layer = small_layer(seed, middle=60)
    exact = 2 * normal(seed, *layer.queries.shape[:3])
    chosen = all_chosen(*_select(layer, Oracle(), Budget(budget), exact, shared=False))
    top = _probability(layer, exact).topk(budget, -1).values.sum(-1)
    assert torch.allclose(_mass(layer, exact, chosen, shared=False).double(), top, rtol=1e-5)


def test_what_else_is_attended_weighs_the_heads_of_a_group() -> None:
    """Where one head of a group gives all its attention to sinks, the choice is the other heads' alone."""
    layer = small_layer(middle=60, G=2)
    exact = torch.full(layer.queries.shape[:3], -torch.inf)
    exact[:, 0] = 50.0
    grouped = all_chosen(*_select(layer, Oracle(), Budget(5), exact, shared=False))
    logits = torch.einsum("hqd,hmd->hqm", layer.queries[:, 1].double(), layer.context.keys.double())
    alone = logits.topk(5, -1).indices
    for head, of_head in enumerate(grouped):
        assert [set(tokens) for tokens in of_head] == [set(tokens.tolist()) for tokens in alone[head]]


@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])
def test_the_window_chooses_and_reads_nothing(shared: bool) -> None:
    layer = small_layer()
    selection, selector = _select(layer, Window(), Budget(1.0), normal(0, *layer.queries.shape[:3]), shared)
    assert selection.cost.index_rows == selection.rows.capacity == 0
    assert not any(tokens for of_head in all_chosen(selection, selector) for tokens in of_head)
