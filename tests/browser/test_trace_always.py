"""Sinks and tail, which every step reads and nothing lights: marked in the text, named on the map, their share told."""

from typing import Any

import pytest
from support.browser import Watched
from support.trace_means import mean_shares, percent, rows_of

from .conftest import Open
from .test_trace_numbers import SELECTIONS, select
from .test_trace_use import IN_VIEW

GROUPS = ("by_token", "by_head", "records")
SENTENCE = (
    " is on text that is always read: sinks, tail, question and answer. It is neither lit nor under “Where it looks”: "
    "the trace has its sum, not what each sentence gets."
)
BEFORE = """(mark) => {
  const range = document.createRange();
  range.setStart(document.getElementById("document"), 0);
  range.setEndBefore(mark);
  return range.toString();
}"""
DRAWN_LABEL = "mark => JSON.parse(getComputedStyle(mark, '::before').content)"
RULES = "marks => marks.map(mark => getComputedStyle(mark, '::after').borderLeftWidth)"
WIDTHS = {"wide": {"width": 1440, "height": 900}, "narrow": {"width": 420, "height": 800}}


def with_ends(trace: dict[str, Any], sinks: int, tail: int) -> dict[str, Any]:
    """The trace of an index with so many sinks and tail tokens: what fell on their passages is always read."""
    middle = range(sinks, trace["n_context"] - tail)
    ends = {n for n, one in enumerate(trace["passages"]) if not set(_positions(one)) <= set(middle)}
    groups = {name: [_without(row, ends) for row in trace[name]] for name in GROUPS}
    records = [row | {"chosen_tokens": [], "missed_tokens": []} for row in groups["records"]]
    return trace | groups | {"records": records, "n_sinks": sinks, "n_middle": len(middle), "n_tail": tail}


def _positions(passage: dict[str, Any]) -> range:
    return range(passage["start"], passage["start"] + len(passage["tokens"]))


def _without(row: dict[str, Any], ends: set[int]) -> dict[str, Any]:
    gone = [shares for passage, *shares in row["passages"] if passage in ends]
    sums = {kind: sum(column) for kind, *column in zip(("chosen", "stood_for", "missed"), *gone, strict=True)}
    less = {kind: max(0.0, row[kind] - value) for kind, value in sums.items()}
    kept = [entry for entry in row["passages"] if entry[0] not in ends]
    return row | less | {"exact": row["exact"] + sum(sums.values()), "passages": kept}


def with_exact(trace: dict[str, Any], exact: float) -> dict[str, Any]:
    """The trace with so much on what is always read, and the rest in proportion."""
    return trace | {name: [_scaled(row, exact) for row in trace[name]] for name in GROUPS}


def _scaled(row: dict[str, Any], exact: float) -> dict[str, Any]:
    part = (1 - exact) / (1 - row["exact"])
    shares = {kind: part * row[kind] for kind in ("chosen", "stood_for", "missed")}
    passages = [[passage, *(float(f"{part * one:.4g}") for one in shares)] for passage, *shares in row["passages"]]
    return row | shares | {"exact": exact, "passages": passages}


def tokens_of(trace: dict[str, Any]) -> list[str]:
    return [token for passage in trace["passages"] for token in passage["tokens"]]


def marks(one: Watched) -> dict[str, str]:
    """The text before each mark in the document, by what the mark says."""
    found = one.page.locator("#document .always-mark").all()
    return {mark.get_attribute("data-always") or "": mark.evaluate(BEFORE) for mark in found}


@pytest.mark.parametrize(("tokens", "layer", "head"), SELECTIONS)
def test_the_share_of_what_is_always_read_is_told(
    opened: Open, trace: dict[str, Any], tokens: tuple[int, int] | None, layer: int | None, head: int | None
) -> None:
    one = opened(trace)
    select(one, tokens, layer, head)
    exact = mean_shares(rows_of(trace, tokens, layer, head))["exact"]
    assert one.text("#always-share") == percent(exact) + SENTENCE
    assert ("most" in (one.page.locator("#always-share").get_attribute("class") or "").split()) is (exact > 0.5)


@pytest.mark.parametrize("exact", [0.3, 0.754])
def test_a_share_above_half_is_prominent(opened: Open, trace: dict[str, Any], exact: float) -> None:
    one = opened(with_exact(trace, exact))
    sentence, note = one.page.locator("#always-share"), one.page.locator("#measures-scope")
    assert sentence.text_content() == f"{100 * exact:.1f}%{SENTENCE}"
    size, usual = (float(at.evaluate("one => parseFloat(getComputedStyle(one).fontSize)")) for at in (sentence, note))
    assert (size > usual) is (exact > 0.5)
    where, below = sentence.bounding_box(), one.page.locator("#list-title").bounding_box()
    assert where
    assert below
    assert where["y"] < below["y"]


def test_no_sentence_without_a_share(opened: Open, trace: dict[str, Any]) -> None:
    one = opened(with_exact(trace, 0.0))
    assert not one.page.locator("#always-share").is_visible()


@pytest.mark.parametrize(
    ("sinks", "tail", "first", "last"),
    [
        (10, 128, "the first 10 tokens", "the last 128 tokens"),
        (1, 1, "the first token", "the last token"),
        (4, 1200, "the first 4 tokens", "the last 1,200 tokens"),
        (300, 0, "the first 300 tokens", None),
        (0, 64, None, "the last 64 tokens"),
    ],
)
def test_ends_are_marked_where_they_begin_and_end(
    opened: Open, trace: dict[str, Any], sinks: int, tail: int, first: str | None, last: str | None
) -> None:
    document = with_ends(trace, sinks, tail)
    one = opened(document)
    tokens = tokens_of(document)
    ends = {"sinks": "", "sinks-end": "".join(tokens[:sinks])} if sinks else {}
    assert marks(one) == ends | ({"tail": "".join(tokens[: len(tokens) - tail])} if tail else {})
    for kind, label in (("sinks", first), ("tail", last)):
        mark = one.page.locator(f".always-mark[data-always='{kind}']")
        if label is None:
            assert mark.count() == 0
            continue
        assert mark.evaluate(DRAWN_LABEL) == mark.get_attribute("aria-label") == f"always read: {label}"
    assert one.text("#document") == "".join(tokens)
    names = [name for name, many in (("sinks", sinks), ("tail", tail)) if many]
    assert f"always read: {', '.join(names)}, question and answer." in one.text("#always-share")


def test_paragraphs_within_an_end_are_ruled(opened: Open, trace: dict[str, Any]) -> None:
    document = with_ends(trace, 300, 600)
    one = opened(document)
    blocks = (
        "blocks => blocks.map(one => [...one.querySelectorAll('.passage')].map(span => Number(span.dataset.passage)))"
    )
    ruled = one.page.locator(".block.always").evaluate_all(blocks)
    positions = [token for block in ruled for passage in block for token in _positions(document["passages"][passage])]
    assert set(positions) <= {*range(300), *range(2400, 3000)}
    assert min(positions) == 0
    assert max(positions) == 2999
    amid = one.page.locator(".block.partly-always").evaluate_all(blocks)
    assert [
        any(token in _positions(document["passages"][n]) for n in block)
        for block, token in zip(amid, (299, 2400), strict=True)
    ] == [True, True]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_an_answer_in_the_tail(opened: Open, trace: dict[str, Any], scheme: str, width: str) -> None:
    """Nothing lights what is appended at the end, but the page says so, and the map goes there."""
    document = with_exact(with_ends(trace, 10, 128), 0.754)
    one = opened(document, color_scheme=scheme, viewport=WIDTHS[width])
    tail = [n for n, passage in enumerate(document["passages"]) if _positions(passage)[-1] >= trace["n_context"] - 128]
    assert not set(one.lit()) & set(tail)
    assert one.text("#always-share") == f"75.4%{SENTENCE}"
    sentence = one.page.locator("#always-share").bounding_box()
    assert sentence
    assert sentence["y"] + sentence["height"] < WIDTHS[width]["height"]
    one.page.get_by_role("button", name="always read: the last 128 tokens").click()
    mark = one.page.locator(".always-mark[data-always='tail']")
    assert mark.evaluate(IN_VIEW)
    assert one.page.locator(".always-mark:not([data-always='sinks'])").evaluate_all(RULES) == ["3px", "3px"]
    wide = "document.documentElement.scrollWidth <= innerWidth"
    assert one.page.evaluate(wide)


def test_the_map_names_its_ends(opened: Open, trace: dict[str, Any]) -> None:
    """To those who see it, point at it, hear it, or use the keyboard alone."""
    one = opened(with_ends(trace, 10, 128))
    labels = ["always read: the first 10 tokens", "always read: the last 128 tokens"]
    buttons = one.page.locator(".always-end")
    assert buttons.all_text_contents() == ["always read"] * 2
    assert [button.get_attribute("title") for button in buttons.all()] == labels
    picture = one.page.get_by_role("img", name="Map of the document: where attention lies; " + "; ".join(labels))
    assert picture.count() == 1
    assert [one.page.locator("#document").get_by_role("img", name=label, exact=True).count() for label in labels] == [
        1,
        1,
    ]
    for button, kind in zip(buttons.all(), ("sinks", "tail"), strict=True):
        button.press("Enter")
        assert one.page.locator(f".always-mark[data-always='{kind}']").evaluate(IN_VIEW)


def test_marks_stay_while_the_text_is_searched(opened: Open, trace: dict[str, Any]) -> None:
    document = with_ends(trace, 10, 128)
    one = opened(document)
    before, text = marks(one), "".join(tokens_of(document))
    at = len("".join(tokens_of(document)[: trace["n_context"] - 128]))
    one.page.locator("#search").fill(text[at - 12 : at + 12])
    assert "".join(one.page.locator("mark.match").all_text_contents()) == text[at - 12 : at + 12]
    assert marks(one) == before
    one.page.keyboard.press("Escape")
    assert marks(one) == before
    assert one.text("#document") == text


def test_the_ends_are_told_without_truth_and_printed(opened: Open, trace: dict[str, Any]) -> None:
    groups = {name: [row | {"missed": None} for row in trace[name]] for name in GROUPS}
    one = opened(trace | groups | {"truth": False, "measures": dict.fromkeys(trace["measures"])}, color_scheme="dark")
    one.page.emulate_media(media="print")
    exact = mean_shares(rows_of(trace, None, None, None))["exact"]
    assert one.text("#always-share") == percent(exact) + SENTENCE
    assert one.page.locator("#always-share").is_visible()
    assert not one.page.locator(".always-end").first.is_visible()
    assert one.page.locator(".always-mark:not([data-always='sinks'])").evaluate_all(RULES) == ["3px", "3px"]


def test_rules_add_no_pages_when_printed(opened: Open, trace: dict[str, Any]) -> None:
    """A label can make a line wrap, which is a page more at most; the rules are clipped where their paragraph ends."""
    with_rules, without = (opened(with_ends(trace, *ends)) for ends in ((300, 600), (0, 0)))
    pages, plain = (one.page.pdf().count(b"/Type /Page\n") for one in (with_rules, without))
    assert plain > 3
    assert pages - plain in (0, 1)
