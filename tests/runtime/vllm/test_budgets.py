"""Method and budget of a server, and the budget that a request names."""

from typing import Any

import pytest

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.vllm.decoding import DecodeSetting, budget_of, refuse_unknown

CODES = DecodeSetting("codes", Budget(0.05))


@pytest.mark.parametrize(
    ("method", "budget", "setting"),
    [
        (None, None, None),
        ("codes", None, DecodeSetting("codes", "default")),
        ("codes", "5%", CODES),
        ("codes", 0.05, CODES),
        ("codes", 300, DecodeSetting("codes", Budget(300))),
        ("codes", "dense", DecodeSetting("codes", None)),
    ],
)
def test_a_servers_setting(method: Any, budget: Any, setting: DecodeSetting | None) -> None:
    assert DecodeSetting.parse(method, budget) == setting


@pytest.mark.parametrize(
    ("method", "budget", "said"),
    [
        ("code", None, "no \"method\" 'code'; use one of codes, "),
        (["codes"], None, "no \"method\" \\['codes'\\]"),
        ("dense", None, "no \"method\" 'dense'"),
        ("codes", "7x", '"budget" 7x is not a budget'),
        ("codes", 0, '"budget" 0 is not a budget'),
        (None, "5%", '"budget" needs "method"'),
    ],
)
def test_a_wrong_setting_is_refused(method: Any, budget: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        DecodeSetting.parse(method, budget)


def test_a_request_may_name_another_budget() -> None:
    assert budget_of(CODES, {}) == Budget(0.05)
    assert budget_of(CODES, {"sparsekv_budget": "2%"}) == Budget(0.02)
    assert budget_of(CODES, {"sparsekv_budget": 100}) == Budget(100)
    assert budget_of(CODES, {"sparsekv_budget": 1.0}) == Budget(1.0)
    assert budget_of(CODES, {"sparsekv_budget": "dense"}) is None
    assert budget_of(DecodeSetting("codes", None), {}) is None
    assert budget_of(DecodeSetting("codes", "default"), {}) == "default"
    assert budget_of(DecodeSetting("codes", "default"), {"sparsekv_budget": "2%"}) == Budget(0.02)
    assert budget_of(None, {}) is None


@pytest.mark.parametrize("budget", ["", "7x", 0, -3, 1.5, [5], "nan"])
def test_a_request_with_a_wrong_budget_is_refused(budget: Any) -> None:
    with pytest.raises(UsageError, match=r"sparsekv_budget .* is not a budget"):
        budget_of(CODES, {"sparsekv_budget": budget})


def test_a_budget_has_no_effect_on_a_server_without_a_method() -> None:
    with pytest.raises(UsageError, match='sparsekv_budget 5% needs a server with "method"'):
        budget_of(None, {"sparsekv_budget": "5%"})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"indices": ["a.skv"], "methd": "codes"}, 'no setting is called "methd"; use indices, method, budget'),
        ({"method": "codes"}, 'needs "indices", a list of folders'),
        ({"indices": "a.skv"}, 'needs "indices", a list of folders'),
    ],
)
def test_unknown_and_missing_settings_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        refuse_unknown(config)


def test_a_setting_says_what_it_is() -> None:
    assert [str(DecodeSetting("codes", budget)) for budget in (Budget(0.05), None, "default")] == [
        "codes within 5%",
        "codes within dense",
        "codes within its default budget",
    ]
