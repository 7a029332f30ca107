"""Reports of the real commands, as HTML pages and as JSON."""

import json
from pathlib import Path
from typing import Any

from .command import run_here
from .html_page import WrittenPage

REPORT = ("recall-report", "--method", "squeezed", "--method", "quest", "--method", "oracle", "--budget", "10%", "-q")
EVAL = ("eval", "doc.txt", "--model", "model", "--length", "600", "--contexts", "1", "--questions", "2", "-q")
ASKED = ("--method", "squeezed", "--task", "niah-single", "--max-new-tokens", "3", "--budget", "10%")


def printed(*command: str) -> Any:
    """Run a command; return its JSON output."""
    outcome = run_here(*command, "--json")
    assert outcome.code == 0, outcome.stderr
    return json.loads(outcome.stdout)


def page_of(*command: str, name: str = "page.html") -> WrittenPage:
    """Run a command; return the page that it writes."""
    outcome = run_here(*command, "--html", name)
    assert outcome.code == 0, outcome.stderr
    return WrittenPage(Path(name))
