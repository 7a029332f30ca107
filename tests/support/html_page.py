"""Parsing of a written HTML page: its elements, its content-security-policy, its data."""

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

HOSTILE = (
    "<script>window.__hacked = 1; document.title = 'hacked'</script>",
    "</script><script>window.__hacked = 1</script>",
    "<!-- <script> --><!--",
    "--><img src=x onerror='window.__hacked = 1'>",
    "<img src=https://example.com/x.png onerror=window.__hacked=1>",
    "<svg/onload=window.__hacked=1>",
    "<iframe srcdoc='<script>parent.__hacked = 1</script>'></iframe>",
    "<a href=javascript:window.__hacked=1>click</a>",
    "<style>* { display: none }</style></style>",
    "<base href=https://example.com/><link rel=stylesheet href=x.css>",
    "<meta http-equiv=refresh content='0;url=https://example.com'>",
    "</title><body onload=window.__hacked=1>",
    '" onmouseover="window.__hacked=1" x="',
    "[bold]not bold[/bold] &lt;b&gt; &amp; &#60;",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x00\x7f\x9b1m",
    "\u202eright to left\u202c and \u2066isolated",
    "\u05e9\u05dc\u05d5\u05dd, \u0645\u0631\u062d\u0628\u0627 (abc) 123",
    "\U0001f469\u200d\U0001f52c \U0001f511 e\u0301 \U000e0041\U000e007f",
    "line\u2028separator\u2029and\r\nreturn\u0085\ufeff",
    "${window.__hacked = 1} {{constructor.constructor('window.__hacked = 1')()}} `' \\u003cscript>",
)
"""Texts that would do something in a browser if a page did not escape them."""


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    open: bool = True


@dataclass
class WrittenPage(HTMLParser):
    """The elements of a page, in order, each with the text directly in it."""

    path: Path
    elements: list[Element] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.path.read_bytes().decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.elements[-1].open = False

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1].open:
            self.elements[-1].text += data

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def only(self, tag: str, **attributes: str) -> Element:
        """Return the only element with this tag and these attributes; fail if there are several, or none."""
        (found,) = (one for one in self.elements if one.tag == tag and attributes.items() <= one.attributes.items())
        return found

    def data(self) -> Any:
        return json.loads(self.only("script", id="data").text)

    def script(self) -> str:
        (found,) = (one for one in self.elements if one.tag == "script" and not one.attributes)
        return found.text

    def policy(self) -> dict[str, list[str]]:
        """Return the directives of the content-security-policy, with their sources."""
        content = self.only("meta", **{"http-equiv": "Content-Security-Policy"}).attributes["content"] or ""
        return {name: sources for name, *sources in (part.split() for part in content.split(";"))}

    def references(self) -> list[str]:
        """Return the attributes and the code by which a browser could load something else."""
        loading = {"src", "href", "srcset", "data", "action", "poster", "background", "style", "ping"}
        attributes = [f"{one.tag} {name}" for one in self.elements for name in one.attributes if name in loading]
        return attributes + re.findall(
            r"url\(|@import|\bfetch\(|XMLHttpRequest|https?://", self.only("style").text + self.script()
        )


def source_of(text: str) -> str:
    """Return the policy's source for an element with exactly this text: the text's hash."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
