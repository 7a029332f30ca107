"""The documentation's pages, cut into their links and fenced blocks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS_PAGE = ROOT / "docs" / "reference" / "commands.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if page != COMMANDS_PAGE]
"""All pages except the command reference, which is generated."""
SET_UP = {
    "make demo",
    "make test",
    "make docs",
    "python3 -m venv .venv",
    ". .venv/bin/activate",
    "pip install -c constraints.txt .",
    "pip install -c constraints.txt '.[cpu]'",
}
"""Lines that a fresh clone runs as its set-up, and that a test does not run."""
SHELL = ("sh", "bash")
HEAVY = {
    r"--context \d+K|bench-model": "a shape of a large model",
    r"sparsekv [^|]*(--model|-m) (?!smollm2)|--device cuda": "a model or device that not everybody has",
    r"sparsekv eval (?!.*--length [1-9]\d{0,2}\b)": "contexts of 4,096 tokens: give `--length 320`",
}
"""Patterns of commands that are too heavy for a test, with the reason."""
MARKER = re.compile(r"\s*<!-- (recorded|long|tested): (.+) -->\s*")


def name(page: Path) -> str:
    """Return a page's path within the repository."""
    return page.relative_to(ROOT).as_posix()


def without_blocks(page: Path) -> str:
    """Return a page's text with emptied fenced blocks; all lines keep their numbers."""
    text, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = line.lstrip().startswith("```")
        inside ^= fence
        text.append("" if fence or inside else line)
    return "\n".join(text)


@dataclass(frozen=True)
class Block:
    """A fenced block: the line where it opens, the word after its fence, its text, and the text of the lines before
    it."""

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
        """The block's lines, without comments and blank lines; a line that continues after a backslash is joined."""
        lines = (line.strip() for line in self.text.replace("\\\n", " ").splitlines())
        return [line for line in lines if line and not line.startswith("#")]

    @property
    def is_set_up(self) -> bool:
        """Whether every line is part of a fresh clone's set-up."""
        plain = [re.sub(r"\s+#.*", "", line) for line in self.commands]
        return self.info in SHELL and bool(plain) and all(line in SET_UP for line in plain)

    @property
    def runs(self) -> bool:
        """Whether a test runs the block, together with the other such blocks of its page."""
        return self.info in (*SHELL, "python") and self.marker is None and not self.is_set_up

    def fault(self) -> str | None:
        """Return the reason why no test and no mark says whether the block is true; None if one does."""
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
        """Return the reason why a block's commands are too heavy for a test; None if they are not."""
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
    """Yield every fenced block of a page, from top to bottom."""
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
    """Yield the rows, as lists of cells, of every table whose header begins with the given columns."""
    wanted = False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            wanted = False
        elif cells[: len(columns)] == list(columns):
            wanted = True
        elif wanted and set(line) - set("|-: "):
            yield cells
