"""Writes docs/reference/commands.md from the commands' own --help, so that the two cannot disagree."""

import io
from contextlib import redirect_stdout
from pathlib import Path

from sparsekv.cli.app import app
from sparsekv.cli.common.commands import COMMANDS as MAIN

PAGE = Path(__file__).parent / "reference" / "commands.md"
COMMANDS = ["", *MAIN, "models list", "models pull"]
WITH_METHODS = ("build-index", "generate", "chat", "recall-report", "eval", "bench", "bench-model")
OF_METHODS = {name: ["--method", "all"] for name in WITH_METHODS}
HEAD = "# Commands\n\nWritten by `make docs` from each command's `--help`.\n"


def render() -> str:
    """Return the whole page."""
    return HEAD + "".join(f"\n## sparsekv {name}".rstrip() + f"\n\n```\n{_help(name)}\n```\n" for name in COMMANDS)


def _help(name: str) -> str:
    text = io.StringIO()
    with redirect_stdout(text):
        app(
            [*name.split(), *OF_METHODS.get(name, []), "--help"],
            standalone_mode=False,
            prog_name="sparsekv",
            terminal_width=100,
        )
    return text.getvalue().strip()


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
