"""The documentation's pages, cut into their links and fenced blocks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS_PAGE = ROOT / "docs" / "reference" / "commands.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if page != COMMANDS_PAGE]
"""All but the command reference, which is generated."""
SET_UP = {
    "make demo",
    "make test",
    "make docs",
    "python3 -m venv .venv",
    ". .venv/bin/activate",
    "pip install -c constraints.txt .",
    "pip install -c constraints.txt '.[cpu]'",
}
"""What a fresh clone is told to run: of no use to a test within one."""
SHELL = ("sh", "bash")
HEAVY = {
    r"--context \d+K|bench-model": "a shape of a large model",
    r"sparsekv [^|]*(--model|-m) (?!smollm2)|--device cuda": "a model or device that not everybody has",
    r"sparsekv eval (?!.*--length [1-9]\d{0,2}\b)": "contexts of 4,096 tokens: give `--length 320`",
}
"""What no page's commands may have where they are run, and why."""
MARKER = re.compile(r"\s*<!-- (recorded|long|tested): (.+) -->\s*")


def name(page: Path) -> str:
    """A page's path within the repository."""
    return page.relative_to(ROOT).as_posix()


def without_blocks(page: Path) -> str:
    """A page's text with its fenced blocks emptied, its lines where they were."""
    text, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = line.lstrip().startswith("```")
        inside ^= fence
        text.append("" if fence or inside else line)
    return "\n".join(text)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it opens, the word behind its fence, its text, and what the lines before it say."""

    page: Path
    line: int
    info: str
    text: str
    marker: tuple[str, str] | None
    before: str

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Its lines without comments and blank ones, those that go on after a backslash joined."""
        lines = (line.strip() for line in self.text.replace("\\\n", " ").splitlines())
        return [line for line in lines if line and not line.startswith("#")]

    @property
    def is_set_up(self) -> bool:
        """Whether every line is one that a fresh clone runs."""
        plain = [re.sub(r"\s+#.*", "", line) for line in self.commands]
        return self.info in SHELL and bool(plain) and all(line in SET_UP for line in plain)

    @property
    def runs(self) -> bool:
        """Whether it is for a test to run, with the others of its page."""
        return self.info in (*SHELL, "python") and self.marker is None and not self.is_set_up

    def fault(self) -> str | None:
        """Why nobody can tell whether what it says is true; None where somebody can."""
        kind = self.marker[0] if self.marker else ""
        if self.runs:
            return self._fault_of_commands()
        if self.is_set_up or self.info == "text":
            return None
        if kind == "recorded":
            return None
        if kind == "long":
            return None if self.info in SHELL else "commands that are long to run are of the kind `sh`"
        if kind == "tested":
            return self._fault_of_test(self.marker[1] if self.marker else "")
        if re.match(r"(\$ )?(sparsekv|make|pip|python3?) ", self.text):
            return "it looks like commands: write `sh` behind the fence, or say why it is not run"
        if not self.info and re.search(r"`(sparsekv|make|python) [^`]+`[^`]*:$", self.before):
            return None
        return (
            "is it to be run (`sh`, `python`), a drawing or formula (`text`), or an output? Then the line before it is "
            "<!-- recorded: COMMAND -->"
        )

    def _fault_of_commands(self) -> str | None:
        """What of a block that is run would take longer than a test may."""
        if self.info not in SHELL:
            return None
        for command in self.commands:
            for pattern, reason in HEAVY.items():
                if re.search(pattern, command):
                    return f"`{command}` asks for {reason}; or write <!-- long: WHY --> on the line before the block"
        return None

    def _fault_of_test(self, path: str) -> str | None:
        file = ROOT / path
        if not file.is_file():
            return f"the test that is named, {path}, is not there"
        return None if name(self.page) in file.read_text(encoding="utf-8") else f"{path} does not name this page"


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page, from top to bottom."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            start = number
            continue
        opening = lines[start]
        indent = len(opening) - len(opening.lstrip())
        text = "\n".join(inner[indent:] for inner in lines[start + 1 : number]) + "\n"
        found = MARKER.fullmatch(lines[start - 1]) if start else None
        above = lines[: start - 1 if found else start]
        before = " ".join("\n".join(above).rstrip().split("\n\n")[-1].split())
        yield Block(page, start + 1, opening.strip().strip("`"), text, (found[1], found[2]) if found else None, before)
        start = None
    assert start is None, f"{name(page)}:{(start or 0) + 1}: a block has no end"


def tables(page: Path, *columns: str) -> Iterator[list[str]]:
    """The rows, cell by cell, of every table whose header begins with some columns."""
    wanted = False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            wanted = False
        elif cells[: len(columns)] == list(columns):
            wanted = True
        elif wanted and set(line) - set("|-: "):
            yield cells
