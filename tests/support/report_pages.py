"""Pages of reports, written by the real commands, and what the commands print as JSON."""

import json
from pathlib import Path
from typing import Any

from .command import run_here
from .html_page import WrittenPage

REPORT = ("recall-report", "--method", "squeezed", "--method", "quest", "--method", "oracle", "--budget", "10%", "-q")
EVAL = ("eval", "doc.txt", "--model", "model", "--length", "600", "--contexts", "1", "--questions", "2", "-q")
ASKED = ("--method", "squeezed", "--task", "niah-single", "--max-new-tokens", "3", "--budget", "10%")


def printed(*command: str) -> Any:
    """What a command prints as JSON."""
    outcome = run_here(*command, "--json")
    assert outcome.code == 0, outcome.stderr
    return json.loads(outcome.stdout)


def page_of(*command: str, name: str = "page.html") -> WrittenPage:
    """The page that a command writes."""
    outcome = run_here(*command, "--html", name)
    assert outcome.code == 0, outcome.stderr
    return WrittenPage(Path(name))
