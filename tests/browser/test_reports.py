"""Pages of reports in Chromium: tables sort, marks say the table's numbers, hostile texts stay text."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.browser import Watched, watched
from support.html_page import HOSTILE

from sparsekv.cli.evaluating.output import evaluation_page
from sparsekv.cli.pages.page import Page, report_page, write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Show = Callable[..., Watched]


@pytest.fixture
def shown(browser: "Browser", tmp_path: Path) -> Iterator[Show]:
    """Open a page; options are those of a browser's context."""
    pages: list[Watched] = []
    with ExitStack() as stack:

        def one(page: Page, **options: Any) -> Watched:
            path = tmp_path / f"{len(pages)}.html"
            write_page(page, path, "--html")
            pages.append(stack.enter_context(watched(browser, path, **options)))
            return pages[-1]

        yield one
        assert [problem for page in pages for problem in page.problems()] == []


def recall_data(name: str = "doc.skv") -> dict[str, Any]:
    """A report of three methods at two budgets, of two layers with two heads."""
    rows = [
        {
            "method": method,
            "variant": "",
            "budget": share,
            "budget_tokens": int(1000 * share),
            "selected_tokens": 1000 * share,
            "recall": min(1.0, 0.3 * number + 4 * share),
            "attention_mass": 0.5,
            "output_error": 0.01 * number + 0.002 / share,
            "kv_fraction": 0.08 * number + share,
            "missed_mass": 0.2,
            **dict.fromkeys(("missed_estimate", "recall_seen", "list_coverage", "raised", "dense")),
            "layer": None,
            "kv_head": None,
            "together": 1,
            "front": number == 1,
        }
        for number, method in enumerate(["codes", "quest", name], 1)
        for share in (0.05, 0.1)
    ]
    grid = [[0.25, 0.5], [0.75, 1.0]]
    return {
        "index": name,
        "model": name,
        "n_context": 1100,
        "n_middle": 1000,
        "n_queries": 64,
        "prefill": "dense",
        "within": 0.12,
        "best": rows[0],
        "rows": rows,
        "maps": {"layers": [0, 1], "heads": [0, 1], "rows": [{"recall": grid, "output_error": grid}] * len(rows)},
        "budgets": {"rows": [f"{100 * row['budget']:g}%" for row in rows], "best": "5%"},
        "answers": f"Right answers are measured with `sparsekv eval {name}`.",
        "trace": f"sparsekv trace --index {name} question",
    }


def recall(name: str = "doc.skv") -> Page:
    return report_page(name, recall_data(name), "recall_page.js")


def column(one: Watched, name: str) -> list[str]:
    at = one.page.locator("thead th").all_text_contents().index(name)
    return [row.locator("td").nth(at).text_content() or "" for row in one.page.locator("tbody tr").all()]


def test_a_table_is_sorted_by_numbers_and_back(shown: Show) -> None:
    one = shown(recall())
    errors = column(one, "output error")
    one.page.get_by_role("button", name="output error").click()
    assert column(one, "output error") == sorted(errors, key=float, reverse=True)
    one.page.get_by_role("button", name="output error").press("Enter")
    assert column(one, "output error") == sorted(errors, key=float)
    assert one.page.locator("th[aria-sort=ascending]").text_content() == "output error"
    one.page.get_by_role("button", name="selected tokens").click()
    assert column(one, "selected tokens") == ["100"] * 3 + ["50"] * 3


def test_numbers_half_way_between_two_are_rounded_as_in_the_table_of_a_terminal(shown: Show) -> None:
    data, halves = recall_data(), (0.0625, 0.1875, 0.3125, 0.5625, 0.8125, 0.9375)
    for row, half in zip(data["rows"], halves, strict=True):
        row.update(recall=half, kv_fraction=half, output_error=half / 2, selected_tokens=1000 + 8 * half)
    one = shown(report_page("", data, "recall_page.js"))
    assert column(one, "recall") == column(one, "kv fraction") == [f"{half:.3f}" for half in halves]
    assert column(one, "output error") == [f"{half / 2:.4f}" for half in halves]
    assert column(one, "selected tokens") == [f"{1000 + 8 * half:,.0f}" for half in halves]


def test_every_method_has_a_colour_of_its_own(shown: Show) -> None:
    data = recall_data()
    data["rows"] = [{**data["rows"][0], "method": f"method {number}"} for number in range(20)]
    data["maps"]["rows"] *= 4
    data["budgets"]["rows"] = ["5%"] * 20
    lines = shown(report_page("", data, "recall_page.js")).page.locator("figure:has(.axes)").first.locator(".line")
    colours = lines.evaluate_all("lines => lines.map(line => line.style.getPropertyValue('--own'))")
    assert len(set(colours)) == len(colours) == 20


def test_every_point_says_the_numbers_of_its_row(shown: Show) -> None:
    one = shown(recall())
    names = ("recall", "output error", "kv fraction")
    rows = zip(column(one, "method"), column(one, "budget"), *(column(one, name) for name in names), strict=True)
    expected = {
        f"{method} at {budget}: recall {recall}, output error {error}, kv fraction {kv}"
        for method, budget, recall, error, kv in rows
    }
    for figure in one.page.locator("figure:has(.axes)").all():
        told = set()
        for point in figure.locator("circle").all():
            point.dispatch_event("pointerenter")
            told.add(figure.locator("output").text_content() or "")
        assert told == expected


def test_marks_are_gone_through_by_keys(shown: Show) -> None:
    one = shown(recall())
    figure = one.page.locator("figure.heat-map").first
    figure.locator("svg").focus()
    told = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        one.page.keyboard.press(key)
        told.append(figure.locator("output").text_content())
    assert told[0] == "layer 0, KV head 0: recall 0.250"
    assert told[1:] == [
        "layer 0, KV head 1: recall 0.500",
        "layer 1, KV head 0: recall 0.750",
        "layer 0, KV head 1: recall 0.500",
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button(shown: Show, scheme: str) -> None:
    one = shown(recall(), color_scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    before = one.page.evaluate(paper)
    one.page.get_by_role("button", name="Use").click()
    assert one.page.evaluate(paper) != before


def test_a_narrow_window_and_paper_show_all(shown: Show) -> None:
    one = shown(recall(), viewport={"width": 400, "height": 700})
    assert one.page.evaluate("document.documentElement.scrollWidth") <= 400
    one.page.emulate_media(media="print")
    assert not one.page.locator(".choice").first.is_visible()
    assert one.page.locator("table").first.is_visible()


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_stay_text(shown: Show, text: str) -> None:
    one = shown(recall(text))
    for point in one.page.locator("circle").all():
        point.dispatch_event("pointerenter")
    one.page.wait_for_timeout(50)
    assert not one.hacked()
    assert one.page.locator("script, style, img, iframe, svg svg, base, link").count() == 3


def inspection(text: str) -> Page:
    cluster = {"layer": 0, "kv_head": 0, "cluster": 3, "tokens": 2, "key_spread": 0.5, "words": {text: 2}}
    level = {
        "layer": 0,
        "level": 0,
        "clusters": 4,
        "empty": 0,
        "single": 1,
        "min": 1,
        "median": 2.0,
        "p99": 3.0,
        "max": 3,
    }
    spread = {"key_spread": 0.25, "value_spread": None}
    method = {
        "parameters": {text: text},
        "layers": [{**level, **spread}, {**level, **spread, "layer": 1, "key_spread": 0.75}],
        "blocks": [{"start": 4, "stop": 20, "tokens": 16, "clusters": 4, "open": True}],
        "biggest": [cluster],
        "most_spread": [cluster],
        "lists": [],
    }
    told = {
        "index": text,
        "created": text,
        "verified": False,
        "model": {"id": text},
        "dtype": "float32",
        "split": {"sinks": 4, "middle": 16, "tail": 4, "tokens": 24},
        "chat_template": True,
        "layers": {"all": 2, "indexed": 2},
        "bytes": {"context": 1_500_000},
        "defaults": None,
        "methods": {text: method},
    }
    texts = [f"w{number} " if number % 6 else f"w{number}. " for number in range(24)]
    texts[10] = text
    places = {text: {"biggest": [[8, 10]], "most_spread": [[8, 10]]}}
    data = {"inspection": told, "facts": {"prefill": text}, "positions": places, "texts": texts}
    return report_page(text, data, "inspect_clusters.js", "inspect_page.js")


def test_clusters_are_shown_in_their_sentences(shown: Show) -> None:
    one = shown(inspection("word"))
    assert one.page.locator(".facts-list").text_content() == "prefillword"
    passage = one.page.locator(".passage").first
    assert passage.text_content() == "w7 w8 w9 wordw11 w12. "
    assert passage.locator("mark").all_text_contents() == ["w8 ", "word"]
    one.page.locator(".place").first.dispatch_event("pointerenter")
    assert one.page.locator("figure:has(.strip) output").first.text_content() == "token 8 of 24"
    point = one.page.locator("figure:has(.axes)").first.locator("circle").nth(1)
    point.dispatch_event("pointerenter")
    told = one.page.locator("figure:has(.axes)").first.locator("output").text_content()
    assert told == "layer 1, level 0 keys: spread 0.750"


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_documents_stay_text(shown: Show, text: str) -> None:
    one = shown(inspection(text))
    one.page.wait_for_timeout(50)
    assert not one.hacked()
    assert one.page.locator("script, style, img, iframe, svg svg, base, link").count() == 3


def evaluation(cells: list[dict[str, Any]], *more: float) -> Page:
    """An evaluation of dense attention and codes, at 5% and at `more` budgets, with needles by depth in some
    `cells`."""
    way = {"task": "niah-single", "length": 600, "prefill": "dense", "method": "dense", "variant": "", "budget": None}
    counted = {
        "tokens": 600.0,
        "turn": None,
        "metric": "exact",
        "unit": "%",
        "contexts": 2,
        "questions": 8,
        "kv_fraction": 1.0,
        "seconds": 0.5,
    }
    nothing = dict.fromkeys(("difference", "difference_low", "difference_high", "same_as_dense"))
    dense = {**way, **counted, **nothing, "score": 80.0, "score_low": 70.0, "score_high": 90.0}
    compared = {"difference": -5.0, "difference_low": -9.0, "difference_high": 1.0, "same_as_dense": 75.0}
    compared["kv_fraction"] = 0.1
    others = [{**dense, **compared, "method": "codes", "budget": one, "score": 75.0} for one in (0.05, *more)]
    depths = [{**way, "questions": 4, **cell} for cell in cells]
    record = {"document": "doc", "model": "m", "seed": 0, "work": "w", "rows": [dense, *others], "depths": depths}
    return evaluation_page(json.loads(json.dumps(record)))


def test_needle_maps_have_one_scale_of_colours(shown: Show) -> None:
    """Also one whose cells are all the same, and one without the lowest."""
    scores = {"codes": (0.0, 100.0), "quest": (50.0, 100.0), "dense": (100.0, 100.0)}
    cells = [
        {"method": name, "depth": depth, "score": score}
        for name, pair in scores.items()
        for depth, score in zip((0.25, 0.75), pair, strict=True)
    ]
    maps = shown(evaluation(cells)).page.locator("figure.heat-map")
    fill = "cells => cells.map(cell => getComputedStyle(cell).fill)"
    codes, quest, dense = (one.locator("rect").evaluate_all(fill) for one in maps.all())
    assert codes[1] == quest[1] == dense[0] == dense[1]
    assert len({codes[0], quest[0], codes[1]}) == 3
    assert {one.locator(".heat-bar .number").all_text_contents()[1] for one in maps.all()} == {"100.0"}


def test_an_evaluation_says_intervals(shown: Show) -> None:
    one = shown(evaluation([{"depth": 0.25, "score": 75.0}]))
    figure = one.page.locator("figure:has(.axes)")
    figure.locator("circle").dispatch_event("pointerenter")
    assert figure.locator("output").text_content() == "codes at 5%: score 75.0 [70.0, 90.0], kv fraction 0.100"
    assert "dense attention: 80.0 [70.0, 90.0]" in (figure.text_content() or "")
    assert column(one, "difference to dense") == ["", "\u22125.0"]
    assert one.page.locator("figure.heat-map rect").count() == 1


def test_budgets_are_sorted_by_tokens(shown: Show) -> None:
    """A share of 100% is more than 20 tokens, and 20 tokens of 600 are less than 5%."""
    one = shown(evaluation([], 20, 1.0))
    one.page.get_by_role("button", name="budget").click()
    assert column(one, "budget") == ["100%", "5%", "20", ""]


def test_depths_are_in_whole_percent(shown: Show) -> None:
    one = shown(evaluation([{"depth": depth, "score": 75.0} for depth in (1 / 6, 0.5)]))
    assert one.page.locator("figure.heat-map svg text").all_text_contents()[:2] == ["17%", "50%"]
