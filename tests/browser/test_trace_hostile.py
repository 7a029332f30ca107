"""Whatever a document, question or answer says is text: shown as it is, and run by nothing."""

import re
import subprocess
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.browser import watched
from support.html_page import HOSTILE

from .conftest import Open

if TYPE_CHECKING:
    from playwright.sync_api import Browser

UNQUOTED = ("it's 'quoted' \"twice\" \\ $HOME `id` $(id) !! \n; rm -rf x", "-rf --help")
JOINERS = "\t\n\u200c\u200d\u200e\u200f"
"""Control and format characters that texts need, and which show."""


def shown(text: str) -> str:
    """The text with the names of what would steer, in the place of it."""
    return "".join(_name(letter) for letter in text)


def _name(letter: str) -> str:
    if letter in JOINERS or unicodedata.category(letter) not in ("Cc", "Cf", "Zl", "Zp"):
        return letter
    code = ord(letter)
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else f"U+{code:04X}"


def hostile(trace: dict[str, Any], text: str) -> dict[str, Any]:
    passages = [{**trace["passages"][0], "tokens": [text, *trace["passages"][0]["tokens"][1:]]}, *trace["passages"][1:]]
    without = {"passages": [text], "answer": text, "log_probability": [-1.0, -2.0]}
    names = {"question": text, "answer": text, "index": text, "model": text, "method": text}
    tokens = [text, *trace["answer_tokens"][1:]]
    return trace | names | {"passages": passages, "answer_tokens": tokens, "without": without}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_is_shown_and_not_run(opened: Open, trace: dict[str, Any], text: str) -> None:
    one = opened(hostile(trace, text))
    one.page.locator(".passage[data-passage='0']").dispatch_event("click")
    one.page.keyboard.press("ArrowRight")
    one.page.locator("#search").fill(text.replace("\n", " ")[:30])
    passage = text + "".join(trace["passages"][0]["tokens"][1:])
    for place, expected in {
        ".passage[data-passage='0']": passage,
        "#question": text,
        "#token-0": text,
        "#answer-with": text,
        "#answer-without": text,
    }.items():
        assert one.text(place) == shown(expected), place
    assert not one.hacked()
    tags = "[...document.body.querySelectorAll('script, img, svg, iframe, a, style, base, link, meta')]"
    assert one.page.evaluate(f"{tags}.map(one => one.tagName)") == ["SCRIPT", "SCRIPT"]


def test_a_script_that_runs_would_be_noticed(browser: "Browser", tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(f"<!DOCTYPE html><title>page</title><p>{HOSTILE[1]}")
    with watched(browser, path) as one:
        assert one.hacked()
        assert one.problems() == []


def test_the_policy_stops_a_script_in_a_page(
    browser: "Browser", opened: Open, trace: dict[str, Any], tmp_path: Path
) -> None:
    """If markup of a text ever got through, it would still not run, and the browser would say so."""
    opened(trace)
    broken = tmp_path / "broken.html"
    text = (tmp_path / "trace-0.html").read_text()
    markup = "<script>window.__hacked = 1</script><img src=https://example.com/x.png onerror=window.__hacked=1>"
    broken.write_text(text.replace("<noscript>", f"{markup}<noscript>"))
    with watched(browser, broken) as one:
        one.page.wait_for_timeout(200)
        assert not one.hacked()
        assert any("Content Security Policy" in said for said in one.said)


def test_a_chats_trace_has_no_command(opened: Open, trace: dict[str, Any]) -> None:
    one = opened({name: value for name, value in trace.items() if name != "options"})
    one.page.locator(".passage[data-passage='0']").dispatch_event("click")
    assert one.text("#detail").startswith("Passage 1, ")
    assert "null" not in one.text("#detail")
    assert one.page.locator("#command").count() == 0


@pytest.mark.parametrize("text", [*HOSTILE, *UNQUOTED])
def test_the_command_without_a_passage_is_quoted(opened: Open, trace: dict[str, Any], text: str) -> None:
    """A shell gives the command exactly the texts, and runs nothing else."""
    of_answer = ["--model", text, "--residual"]
    document = trace | {"question": text, "index": text, "passages": [{"start": 0, "tokens": [text]}]}
    document["options"] = of_answer
    groups = {name: [row | {"passages": []} for row in trace[name]] for name in ("by_token", "by_head", "records")}
    tokens = {"chosen_tokens": [], "missed_tokens": []}
    groups["records"] = [row | tokens for row in groups["records"]]
    one = opened(document | groups)
    one.page.locator(".passage[data-passage='0']").dispatch_event("click")
    if "\0" in text:
        assert one.page.locator("#command").count() == 0
        return
    command = one.text("#command")
    assert all(letter == shown(letter) for letter in command)
    script = f"sparsekv() {{ printf '%s\\0' \"$@\"; }}; {command}"
    environment = {"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, env=environment)
    said = done.stdout.decode().split("\0")[:-1]
    options = [*of_answer, "--without", " ".join(filter(None, re.split("[ \t\r\n]+", text))), "-o", "without.html"]
    beginning = ["trace", "--index", text]
    assert said == ([*beginning, *options, "--", text] if text.startswith("-") else [*beginning, text, *options])
