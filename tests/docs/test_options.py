"""The command reference is what --help prints, and pages use options that are in it."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from support.doc_pages import COMMANDS_PAGE, PAGES, ROOT, WRITTEN, name

# Commands read their options from methods when they are imported: before a test adds one.
from sparsekv.cli import bench, build_index, chat, eval, generate, recall_report, trace  # noqa: F401

OTHERS = {"--import-mode"}
"""Options of other programs that pages name by themselves."""


def sections() -> dict[str, str]:
    """Return the reference's section on each command, by the command's name."""
    parts = re.split(r"^## sparsekv ?(.*)$", COMMANDS_PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def knows(text: str, option: str) -> bool:
    """Whether a help page names an option."""
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text) is not None


def test_the_command_reference_is_what_help_prints() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "generate_help.py"))
    assert script["PAGE"] == COMMANDS_PAGE
    assert COMMANDS_PAGE.read_text(encoding="utf-8") == script["render"](), "run `make docs`"


def used(page: Path) -> list[tuple[str, str]]:
    """Every (command, option) in a call of sparsekv that a page shows."""
    known, found = sections(), set()
    text = page.read_text(encoding="utf-8").replace("\\\n", " ").replace(" -->", "")  # the end of a comment
    for call in re.findall(r"sparsekv ([a-z-]+[^\n|)`]*)", text):
        words = shlex.split(call.replace("'", ""), comments=True) if call.count('"') % 2 == 0 else call.split()
        command = max((one for one in (words[0], " ".join(words[:2])) if one in known), key=len, default=words[0])
        found |= {(command, word.split("=")[0]) for word in words[1:] if word.startswith("--") and len(word) > 2}
    return sorted(found)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_option_of_a_call_exists(page: Path) -> None:
    known = sections()
    lost = [f"sparsekv {command} {one}" for command, one in used(page) if not knows(known.get(command, ""), one)]
    assert not lost, f"{name(page)}: {', '.join(lost)}: see {name(COMMANDS_PAGE)}"


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_every_option_that_stands_by_itself_exists(page: Path) -> None:
    reference = COMMANDS_PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`(--[a-z][a-z-]*)", page.read_text(encoding="utf-8"))) - OTHERS
    lost = sorted(option for option in named if not knows(reference, option))
    assert not lost, f"{name(page)}: no command has {', '.join(lost)}"
