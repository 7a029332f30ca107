"""A run without a terminal says from time to time how far it is."""

import re
import threading
from pathlib import Path

import pytest
from support.command import run_here

from sparsekv.cli.common import console
from sparsekv.cli.common.console import ProgressLines, telling, waiting


def test_the_last_stage_is_told_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "EVERY", 0.001)
    told: list[str] = []
    several = threading.Event()

    def tell(line: str) -> None:
        told.append(line)
        if sum(one.startswith("prefill") for one in told) > 2:  # what comes before a stage is told as well
            several.set()

    with ProgressLines(tell) as lines:
        lines.show("prefill", 512, 1524)
        several.wait()
    after = len(told)
    assert "prefill: 512 of 1,524, " in told[-1]
    assert len(told) == after


def test_a_stage_that_has_ended_is_not_told_as_if_it_went_on() -> None:
    lines = ProgressLines(lambda line: None)
    assert lines.line() == "at work, 0 s"
    lines.show("index codes", 29, 30)
    assert lines.line() == "index codes: 29 of 30, 0 s"
    lines.show("index codes", 30, 30)
    assert lines.line() == "index codes: all 30; at work on what follows, 0 s"


def test_commands_tell_on_stderr_alone_and_not_when_quiet(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "EVERY", 0.001)
    build = ("build-index", "doc.txt", "--model", "model", "--method", "multipole")
    built = run_here(*build, "-o", "new.skv")
    assert (built.code, built.stdout) == (0, "new.skv\n")
    assert "index multipole: " in built.stderr
    assert run_here(*build, "-o", "quiet.skv", "-q").stderr == ""
    reported = run_here("recall-report", "-i", "doc.skv", "--method", "squeezed", "--csv")
    assert "layers: " in reported.stderr
    assert "layers: " not in reported.stdout


def test_loading_is_told_of(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "EVERY", 0.001)
    asked = ("generate", "-i", "doc.skv", "Why?", "--max-new-tokens", "4")
    assert re.search(r"^loading \S*model and opening doc\.skv, \d+ s$", run_here(*asked).stderr, re.MULTILINE)
    assert run_here(*asked, "-q").stderr == ""


def test_one_line_at_a_time_tells_what_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "EVERY", 1000)
    with ProgressLines(lambda line: None) as lines:
        lines.show("prefill", 1, 2)
        with waiting("loading", quiet=False):
            assert lines.line() == "loading, 0 s"
            assert telling() is lines
        assert lines.line() == "prefill: 1 of 2, 0 s"
    assert telling() is None
