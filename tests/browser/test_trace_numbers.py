"""Numbers on a trace's page are those of the trace, whatever is selected."""

from typing import Any

import pytest
from support.browser import Watched
from support.trace_document import synthetic_trace
from support.trace_means import KINDS, mean_measures, mean_passages, mean_shares, percent, rows_of

from .conftest import Open

SELECTIONS = [
    (None, None, None),
    ((3, 3), None, None),
    ((2, 6), None, None),
    (None, 5, None),
    (None, None, 2),
    (None, 7, 1),
    ((4, 4), 7, 1),
    ((0, 9), 3, None),
    ((19, 19), None, 0),
]


def select(one: Watched, tokens: tuple[int, int] | None, layer: int | None, head: int | None) -> None:
    if tokens:
        one.page.locator(f"#token-{tokens[0]}").click()
        one.page.locator(f"#token-{tokens[1]}").click(modifiers=["Shift"])
    one.page.select_option("#layer", "" if layer is None else str(layer))
    one.page.select_option("#head", "" if head is None else str(head))


@pytest.mark.parametrize(("tokens", "layer", "head"), SELECTIONS)
def test_shares_and_measures_of_a_selection(
    opened: Open, trace: dict[str, Any], tokens: tuple[int, int] | None, layer: int | None, head: int | None
) -> None:
    one = opened(trace)
    select(one, tokens, layer, head)
    rows = rows_of(trace, tokens, layer, head)
    shares, passages = mean_shares(rows), mean_passages(rows)
    assert {name: one.text(f"#share-{name}") for name in shares} == {k: percent(v) for k, v in shares.items()}
    listed = sum(sum(parts) for parts in passages.values())
    assert one.text("#elsewhere") == percent(max(0.0, sum(shares[kind] for kind in KINDS) - listed))
    largest = {passage: KINDS[parts.index(max(parts))] for passage, parts in passages.items()}
    assert one.lit() == largest
    measures = mean_measures(trace, tokens, layer, head)
    digits = {"recall": 3, "attention_mass": 3, "output_error": 4, "kv_fraction": 3}
    assert {name: one.text(f"#{name}") for name in digits} == {k: f"{measures[k]:.{n}f}" for k, n in digits.items()}


@pytest.mark.parametrize("tokens", [1, 2])
def test_measures_leave_out_the_first_token_of_an_answer_that_has_more(opened: Open, tokens: int) -> None:
    """The measures of an answer of one token include that token."""
    one = opened(synthetic_trace(300, tokens, 2, 1, 1))
    assert ("leave out the answer's first token" in one.text("#measures-scope")) == (tokens > 1)


def test_the_list_has_the_largest_passages_first(opened: Open, trace: dict[str, Any]) -> None:
    one = opened(trace)
    passages = mean_passages(rows_of(trace, None, None, None))
    ordered = sorted(passages, key=lambda passage: -sum(passages[passage]))
    one.page.get_by_role("button", name="listed passages").click()
    rows = one.page.locator(".passages button")
    shown = [(row.get_attribute("data-passage"), row.locator(".number").text_content()) for row in rows.all()]
    assert shown == [(str(passage), percent(sum(passages[passage]))) for passage in ordered]


def test_switched_off_kinds_count_nowhere(opened: Open, trace: dict[str, Any]) -> None:
    one = opened(trace)
    one.page.keyboard.press("c")
    one.page.get_by_role("button", name="Stood for").click()
    passages = mean_passages(rows_of(trace, None, None, None))
    assert one.lit() == {passage: "missed" for passage, parts in passages.items() if parts[2] > 0}
    missed = mean_shares(rows_of(trace, None, None, None))["missed"] - sum(parts[2] for parts in passages.values())
    assert one.text("#elsewhere") == percent(max(0.0, missed))
    pressed = [one.page.locator(f"#switch-{kind}").get_attribute("aria-pressed") for kind in KINDS]
    assert pressed == ["false", "false", "true"]


def test_a_passage_shows_its_own_shares(opened: Open, trace: dict[str, Any]) -> None:
    one = opened(trace)
    passage, parts = next(iter(mean_passages(rows_of(trace, None, None, None)).items()))
    one.page.locator(f".passage[data-passage='{passage}']").dispatch_event("click")
    shown = one.page.locator("#detail [data-share]").all_text_contents()
    names = ("Chosen", "Stood for", "Missed")
    assert [" ".join(text.split()) for text in shown] == [
        f"{name} {percent(part)}" for name, part in zip(names, parts, strict=True)
    ]
    start = trace["passages"][passage]["start"]
    last = start + len(trace["passages"][passage]["tokens"]) - 1
    assert one.text("#detail h3") == f"Passage {passage + 1:,}, tokens {start:,} to {last:,}"


def test_largest_tokens_of_one_record_are_marked(opened: Open, trace: dict[str, Any]) -> None:
    one = opened(trace)
    select(one, (4, 4), 7, 1)
    (record,) = rows_of(trace, (4, 4), 7, 1)
    tokens = [token for passage in trace["passages"] for token in passage["tokens"]]
    for kind in ("chosen", "missed"):
        expected = {tokens[position] for position, _ in record[f"{kind}_tokens"]} - {""}
        assert set(one.page.locator(f".passage mark.{kind}").all_text_contents()) == expected
    one.page.keyboard.press("Escape")
    assert one.page.locator(".passage mark").count() == 0


def test_heads_have_their_own_shares(opened: Open, trace: dict[str, Any]) -> None:
    """A cell's title says what its head attends to; a click on it selects the head, another one all of them."""
    one = opened(trace)
    row = next(row for row in trace["by_head"] if (row["layer"], row["kv_head"]) == (9, 2))
    cell = one.page.locator(".cell[data-layer='9'][data-head='2']")
    assert cell.get_attribute("title") == f"Layer 9, KV head 2: {percent(sum(row[kind] for kind in KINDS))}"
    cell.click()
    assert one.text("#selection") == "Whole answer, layer 9, KV head 2"
    cell.click()
    assert one.text("#selection") == "Whole answer, all layers, all KV heads"
