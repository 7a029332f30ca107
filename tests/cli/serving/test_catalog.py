"""Configs of requests, by the fields that they set."""

from dataclasses import replace

import pytest
from support.configs import sparse
from support.small_index import INDEXERS, build_small

from sparsekv.cli.serving.shelf import Served, config_of
from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.selection.interface import Budget

BY_METHOD = sparse("multipole", Multipole(), Budget(0.3))
DENSE = DecodeConfig(Dense())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """An index over which dense attention is faster than the method, however few answers share a step."""
    methods = {"multipole": INDEXERS["multipole"]}
    opened = build_small(tmp_path_factory.mktemp("catalog") / "small.skv", methods=methods)
    return Served("small", opened, DENSE, BY_METHOD, None)


def test_a_budget_a_gauge_or_a_prefill_needs_the_method_even_where_dense_attention_is_faster(served: Served) -> None:
    assert config_of(served) == config_of(served, method="dense") == DENSE
    assert config_of(served, budget="10%") == replace(BY_METHOD, budget=Budget(0.1))
    assert config_of(served, gauge=True) == BY_METHOD
    prefilled = config_of(served, prefill="quest")
    assert (prefilled.attention, prefilled.question.name) == (BY_METHOD.attention, "quest")
    assert config_of(served, prefill="dense").attention == Dense()


@pytest.mark.parametrize("named", [{"budget": "10%"}, {"prefill": "quest"}])
def test_dense_attention_that_is_named_uses_neither_budget_nor_prefill(served: Served, named: dict[str, str]) -> None:
    for one, method in ((served, "dense"), (replace(served, by_method=DENSE), None)):
        with pytest.raises(UsageError, match="no effect"):
            config_of(one, method, **named)


def test_a_budget_is_read_in_steps_of_many_answers_too(served: Served) -> None:
    many = replace(served, config=replace(BY_METHOD, dense_from=4))
    assert config_of(many).dense_from == 4
    assert config_of(many, budget="10%").dense_from is None
