"""A trace's page answers the pointer and the keyboard, and what a reader of a screen asks."""

import re
from typing import Any

import pytest
from support.browser import Watched
from support.trace_means import mean_passages, rows_of

from .conftest import Open

IN_VIEW = """(span) => {
  const [own, frame] = [span.getBoundingClientRect(), document.getElementById("document").getBoundingClientRect()];
  return own.bottom > frame.top && own.top < frame.bottom;
}"""


def selected(one: Watched) -> list[int]:
    tokens = one.page.locator("[role=option][aria-selected=true]").all()
    return [int(token.get_attribute("data-at") or -1) for token in tokens]


def picked(one: Watched) -> int | None:
    found = one.page.locator(".passage.picked")
    return int(found.get_attribute("data-passage") or -1) if found.count() else None


def test_tokens_are_selected_by_pointer(opened: Open, trace: dict[str, Any]) -> None:
    one = opened(trace)
    one.page.locator("#token-5").click()
    assert selected(one) == [5]
    one.page.locator("#token-2").click(modifiers=["Shift"])
    assert selected(one) == [2, 3, 4, 5]
    one.page.get_by_role("button", name="Whole answer").click()
    assert selected(one) == []


def test_a_span_is_selected_as_text(opened: Open, trace: dict[str, Any]) -> None:
    one = opened(trace)
    first, last = (one.page.locator(f"#token-{at}").bounding_box() for at in (1, 4))
    assert first
    assert last
    one.page.mouse.move(first["x"] + 2, first["y"] + first["height"] / 2)
    one.page.mouse.down()
    one.page.mouse.move(last["x"] + last["width"] - 2, last["y"] + last["height"] / 2, steps=5)
    one.page.mouse.up()
    assert selected(one) == [1, 2, 3, 4]


def test_tokens_are_selected_by_keys(opened: Open, trace: dict[str, Any]) -> None:
    one = opened(trace)
    for key in ("ArrowRight", "ArrowRight", "Shift+ArrowRight", "Shift+ArrowRight"):
        one.page.keyboard.press(key)
    assert selected(one) == [1, 2, 3]
    assert one.text("#selection") == "Tokens 2 to 4 of 20, all layers, all KV heads"
    assert one.page.locator("#answer").get_attribute("aria-activedescendant") == "token-3"
    one.page.keyboard.press("ArrowLeft")
    assert selected(one) == [2]
    one.page.keyboard.press("Escape")
    assert selected(one) == []
    assert one.text("#selection") == "Whole answer, all layers, all KV heads"


def test_the_page_opens_on_its_sources(opened: Open, trace: dict[str, Any]) -> None:
    """Each with its place, score and text; a click goes to its passage in the document."""
    one = opened(trace)
    starts = [passage["start"] for passage in trace["passages"]]
    rows = one.page.locator("#sources button").all()
    assert [row.is_visible() for row in rows] == [True] * 3 + [False] * 5
    one.page.get_by_role("button", name="All 8 sources").click()
    assert len(rows) == len(trace["sources"]) == 8
    for number, (row, source) in enumerate(zip(rows, trace["sources"], strict=True)):
        first, last = source["lines"]
        lines = f":{first}" if first == last else f":{first}-{last}"
        place = f"{source['path']}{lines}" if source["page"] is None else f"{source['path']} p. {source['page']}"
        told = row.text_content() or ""
        assert told.startswith(f"{source['score']:.3f}{place}")
        assert source["text"].split()[0] in told.removeprefix(f"{source['score']:.3f}{place}")
        passage = one.page.locator(f".passage[data-passage='{starts.index(source['tokens'][0])}']")
        if number == 0:
            assert passage.evaluate(IN_VIEW)
        row.click()
        assert picked(one) == starts.index(source["tokens"][0])
        assert passage.evaluate(IN_VIEW)


def test_lit_passages_are_gone_through_in_order(opened: Open, trace: dict[str, Any]) -> None:
    one = opened(trace)
    one.page.keyboard.press("ArrowRight")
    passages = mean_passages(rows_of(trace, (0, 0), None, None))
    order = sorted(passages)
    one.page.locator("#document").evaluate("pane => { pane.scrollTop = 0 }")
    seen = []
    for _ in order:
        one.page.keyboard.press("n")
        seen.append(picked(one))
        assert one.page.locator(".passage.picked").evaluate(IN_VIEW)
    assert seen == order
    assert one.text("#position") == f"{len(order)} of {len(order)} lit"
    one.page.keyboard.press("p")
    assert picked(one) == order[-2]
    one.page.get_by_role("button", name="Next lit passage").click()
    assert picked(one) == order[-1]


def test_missed_passages_are_gone_through_in_order(opened: Open, trace: dict[str, Any]) -> None:
    one = opened(trace)
    one.page.keyboard.press("ArrowRight")
    passages = mean_passages(rows_of(trace, (0, 0), None, None))
    order = sorted(passage for passage, parts in passages.items() if max(parts) == parts[2])
    seen = []
    for _ in order:
        one.page.keyboard.press("N")
        seen.append(picked(one))
    assert sorted(seen, key=str) == sorted(order, key=str)
    one.page.keyboard.press("P")
    assert picked(one) in order


def test_the_map_scrolls_the_document(opened: Open, trace: dict[str, Any]) -> None:
    one = opened(trace)
    box = one.page.locator(".map").bounding_box()
    assert box
    place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    middle = trace["n_context"] / 2
    passage = max(number for number, one_ in enumerate(trace["passages"]) if one_["start"] <= middle)
    span = one.page.locator(f".passage[data-passage='{passage}']")
    one.page.locator("#document").evaluate("pane => { pane.scrollTop = 0 }")
    assert not span.evaluate(IN_VIEW)
    one.page.mouse.move(place["x"], place["y"])
    one.page.mouse.down()
    assert span.evaluate(IN_VIEW)
    one.page.mouse.move(place["x"], box["y"] + 1, steps=4)
    one.page.mouse.up()
    assert one.page.locator(".passage[data-passage='0']").evaluate(IN_VIEW)


def test_search_finds_what_is_in_the_text(opened: Open, trace: dict[str, Any]) -> None:
    one = opened(trace)
    text = "".join(token for passage in trace["passages"] for token in passage["tokens"])
    found = re.findall("kater", text, re.IGNORECASE)
    one.page.keyboard.press("/")
    one.page.keyboard.type("KATER")
    assert one.text("#matches") == f"1 of {len(found)}"
    mark = one.page.locator("mark.match")
    assert (mark.text_content() or "").lower() == "kater"
    assert mark.evaluate(IN_VIEW)
    one.page.keyboard.press("Enter")
    assert one.text("#matches") == f"2 of {len(found)}"
    one.page.keyboard.press("Shift+Enter")
    assert one.text("#matches") == f"1 of {len(found)}"
    one.page.locator("#search").fill("nothing (like) [this]")
    assert one.text("#matches") == "None"
    one.page.keyboard.press("Escape")
    assert one.page.locator("#search").input_value() == ""
    assert one.page.locator("#answer").evaluate("box => box === document.activeElement")


def test_keys_are_listed_and_do_nothing_while_one_types(opened: Open, trace: dict[str, Any]) -> None:
    one = opened(trace)
    one.page.keyboard.press("?")
    dialog = one.page.get_by_role("dialog", name="Keys")
    assert dialog.is_visible()
    one.page.keyboard.press("Escape")
    assert not dialog.is_visible()
    one.page.locator("#search").fill("")
    one.page.keyboard.type("mcs?n")
    assert one.page.locator("#search").input_value() == "mcs?n"
    assert one.page.locator("#switch-missed").get_attribute("aria-pressed") == "true"


def test_everything_has_a_name_and_focus_is_seen(opened: Open, trace: dict[str, Any]) -> None:
    """Tab goes to everything that can be used; what has the focus has an outline."""
    one = opened(trace)
    unnamed = one.page.evaluate("""() => [...document.querySelectorAll("button, input, select, canvas, [tabindex]")]
      .filter(one => !one.getAttribute("aria-label") && !one.textContent.trim())
      .map(one => one.outerHTML)""")
    assert unnamed == []
    names = set()
    for _ in range(30):
        one.page.keyboard.press("Tab")
        # Where Tab begins is the browser's affair; after the last it goes by the page itself, which has no outline.
        if one.page.evaluate("document.activeElement === document.body"):
            continue
        names.add(one.page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        style = one.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style == "solid"
    assert {"search", "document", "answer", "switch-chosen", "layer", "head"} <= names


def test_without_truth_missed_is_not_known(opened: Open, trace: dict[str, Any]) -> None:
    unknown = {"truth": False, "measures": dict.fromkeys(trace["measures"])}
    groups = {name: [row | {"missed": None} for row in trace[name]] for name in ("by_token", "by_head", "records")}
    one = opened(trace | groups | unknown)
    assert one.page.locator("#switch-missed").is_disabled()
    assert one.text("#share-missed") == "\u2013"
    assert "without --truth" in one.text("#no-truth")
    one.page.keyboard.press("m")
    assert set(one.lit().values()) == {"chosen", "stood_for"}
    assert one.text("#recall") == "\u2013"


def test_both_answers_are_shown_side_by_side(opened: Open, trace: dict[str, Any]) -> None:
    passage = "  " + "".join(trace["passages"][7]["tokens"]).replace(" ", "\n")
    without = {"passages": [passage], "answer": "Nobody <b>knows</b>.", "log_probability": [-4.21, -11.873]}
    one = opened(trace | {"without": without})
    left, right = (one.page.locator(name).bounding_box() for name in ("#answer-with", "#answer-without"))
    assert left
    assert right
    assert (left["y"], left["x"] < right["x"]) == (right["y"], True)
    assert one.text("#answer-without") == "Nobody <b>knows</b>."
    assert "\u22124.21 with, \u221211.87 without: 7.66 lower" in one.text("#log-probability")
    assert one.page.locator(".passage.removed").get_attribute("data-passage") == "7"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_switch(opened: Open, trace: dict[str, Any], scheme: str) -> None:
    one = opened(trace, color_scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    before = one.page.evaluate(paper)
    other = {"light": "dark", "dark": "light"}[scheme]
    one.page.get_by_role("button", name=f"Use {other} colours").click()
    assert one.page.evaluate(paper) != before
    one.page.get_by_role("button", name=f"Use {scheme} colours").click()
    assert one.page.evaluate(paper) == before


LUMINANCE = """(text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((v) => (text.startsWith("color") ? v : v / 255))
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["chosen", "stood_for", "missed"])
def test_the_brightest_passage_can_be_read(opened: Open, trace: dict[str, Any], scheme: str, kind: str) -> None:
    one = opened(trace, color_scheme=scheme)
    span = one.page.locator(".passage").first
    span.evaluate(
        "(span, kind) => { span.dataset.kind = kind; span.style.setProperty('--light', 1) }",
        kind,
    )
    colours = [span.evaluate(f"one => getComputedStyle(one).{what}") for what in ("color", "backgroundColor")]
    dark, light = sorted(one.page.evaluate(LUMINANCE, colour) for colour in colours)
    assert (light + 0.05) / (dark + 0.05) > 4.5


def test_all_of_it_is_printed(opened: Open, trace: dict[str, Any]) -> None:
    one = opened(trace, color_scheme="dark")
    one.page.emulate_media(media="print")
    assert not one.page.locator("#search").is_visible()
    assert one.page.locator("#question").is_visible()
    clipped = one.page.evaluate("""() => ["document", "answer"].map(id => document.getElementById(id))
      .filter(one => one.scrollHeight > one.clientHeight + 1).length""")
    assert clipped == 0
    assert one.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert one.page.pdf().count(b"/Type /Page\n") > 3


def test_a_sentence_that_was_cut_is_quoted_in_whole_words_and_goes_on(opened: Open, trace: dict[str, Any]) -> None:
    row = ".passages li button"
    cut = int(opened(trace).page.locator(row).first.get_attribute("data-passage") or -1)
    passages = [dict(one) for one in trace["passages"]]
    passages[cut]["tokens"] = [*(" quite" for _ in passages[cut]["tokens"][:-1]), " long"]
    one = opened(trace | {"passages": passages})
    words = one.page.locator(row).first.locator(".snippet").inner_text().split()
    assert words[-1] == "\u2026"
    assert set(words[:-1]) <= {"quite", "long"}
    one.page.locator(row).first.click()
    assert one.text("#detail .text").endswith("quite long \u2026")
    one.page.locator(f"#document [data-passage='{cut + 1}']").click()
    assert one.text("#detail .text").startswith("\u2026 ")
    one.page.locator(f"#document [data-passage='{cut + 2}']").click()
    assert "\u2026" not in one.text("#detail .text")
