"""Budgets: what a person may write, and how many tokens it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.selection.interface import Budget


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.05", 0.05),
        ("5%", 0.05),
        ("12.5%", 0.125),
        ("1.0", 1.0),
        ("100%", 1.0),
        ("1%", 0.01),
        (".5", 0.5),
        ("5e-2", 0.05),
        ("1", 1),
        ("300", 300),
        ("+300", 300),
    ],
)
def test_shares_and_counts_are_told_apart_as_a_person_writes_them(text: str, value: float | int) -> None:
    budget = Budget.parse(text)
    assert budget.value == value
    assert type(budget.value) is type(value)


@pytest.mark.parametrize(
    "text",
    ["", " ", "all", "0", "0.0", "0%", "-5", "-0.1", "-5%", "1.5", "300.0", "200%", "nan", "inf", "1e3", "5%%", "0x10"],
)
def test_what_is_no_budget_is_refused_with_what_it_should_be(text: str) -> None:
    with pytest.raises(UsageError, match=r"a share of the document such as 0\.05 or 5%") as refusal:
        Budget.parse(text)
    assert f"--budget {text}" in str(refusal.value)


@given(middle=st.integers(1, 10**6), value=st.integers(1, 10**7) | st.floats(1e-9, 1.0))
def test_tokens_are_at_least_one_and_at_most_all(middle: int, value: float | int) -> None:
    tokens = Budget(value).tokens(middle)
    assert 1 <= tokens <= middle
    assert isinstance(value, float) or tokens in (middle, value)
    if isinstance(value, float):
        assert abs(tokens - value * middle) <= 1
    assert Budget(value).share(middle) == tokens / middle


@given(middle=st.integers(1, 10**6))
def test_one_token_and_everything_are_different_budgets(middle: int) -> None:
    assert Budget.parse("1") != Budget.parse("1.0")
    assert Budget.parse("1").tokens(middle) == 1
    assert Budget.parse("1.0").tokens(middle) == middle


@given(value=st.integers(1, 10**6) | st.integers(1, 1000).map(lambda thousandths: thousandths / 1000))
def test_what_a_budget_prints_is_read_back_as_the_same(value: float | int) -> None:
    assert Budget.parse(str(Budget(value))) == Budget(value)


def test_a_budget_counts_once_however_it_is_written() -> None:
    budgets = Budget.parse_each(["5%", "1", "0.05", "100%", "1.0", "+1", "5e-2", "2.9%", "0.029"])
    assert [str(budget) for budget in budgets] == ["5%", "1", "100%", "2.9%"]


@pytest.mark.parametrize(
    ("value", "middle", "told"),
    [
        (0.05, 3947, "5% (197 tokens)"),
        (480, 12_000, "480 tokens (4.0%)"),
        (0.05, 16, "5% (1 token)"),
        (90, 9, "9 tokens (100.0%)"),
    ],
)
def test_a_budget_tells_the_share_and_the_tokens(value: float | int, middle: int, told: str) -> None:
    assert Budget(value).told(middle) == told
