"""The pages say what the program does."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from support.command import run_here

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_command_reference_is_what_help_prints() -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate_help.py"))
    assert generate["PAGE"].read_text(encoding="utf-8") == generate["render"](), "run `make docs`"


def _options() -> list[tuple[str, str, str]]:
    """Every (page, command, option) that a code block of a page uses."""
    used = set()
    for page in PAGES:
        for line in re.findall(r"sparsekv (?:[a-z-]+)[^\n|)`]*", page.read_text(encoding="utf-8")):
            words = shlex.split(line.replace("'", ""), comments=True) if line.count('"') % 2 == 0 else []
            used |= {(page.name, words[1], word.split("=")[0]) for word in words[2:] if word.startswith("--")}
    return sorted(used)


def test_every_option_that_a_page_uses_exists() -> None:
    helps: dict[str, str] = {}
    missing = []
    for page, command, option in _options():
        if command not in helps:
            outcome = run_here(command, "--help")
            assert outcome.code == 0, f"{page}: {command}"
            helps[command] = outcome.stdout
        if not re.search(rf"{option}\b", helps[command]):
            missing.append((page, command, option))
    assert not missing
    assert helps


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target
