"""Records the transcript of docs/how-to/chat.md: types what a person would type to `sparsekv chat` on a terminal.

Needs the index that `make demo` builds. Run it as `.venv/bin/python docs/record_chat.py`.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pexpect

ROOT = Path(__file__).parents[1]
PAGE, DEMO = ROOT / "docs" / "how-to" / "chat.md", ROOT / "demo"
SPARSEKV = Path(sys.executable).with_name("sparsekv")
ENTRIES = (
    "What does the assert statement do?",
    "When is it not executed?",
    "/stats",
    "/method multipole",
    "/budget 5%",
    "Which statement raises an exception?",
    "/budgt 20%",
    "/save talk.skv",
    "/forget",
    "/quit",
)
PROMPT = r"\x1b\[\?2004h> "
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")
BARS = re.compile(r"[^\n]*━[^\n]*\n")
"""Matches each drawing of a progress bar, which would otherwise be a line of the page."""
RECORDED = re.compile(r"(<!-- recorded: [^\n]*record_chat\.py -->\n```\n).*?```", re.DOTALL)
PATIENCE = 1200  # seconds


def transcript() -> str:
    """Return the terminal's text at the end of the chat."""
    talk = DEMO / "talk.skv"
    shutil.rmtree(talk, ignore_errors=True)
    command = ["chat", "--index", "python-topics.skv", "--max-new-tokens", "64"]
    terminal = {"env": os.environ | {"TERM": "xterm"}, "dimensions": (40, 160), "encoding": "utf-8"}
    child = pexpect.spawn(str(SPARSEKV), command, cwd=str(DEMO), timeout=PATIENCE, **terminal)
    shown = [f"$ sparsekv {' '.join(command)}\n"]
    for entry in ENTRIES:
        child.expect(PROMPT)
        shown.append(f"{child.before}> ")
        child.send(f"{entry}\r")
    child.expect(pexpect.EOF)
    shutil.rmtree(talk)
    text = BARS.sub("", ESCAPES.sub("", "".join([*shown, child.before]))).strip()
    assert "```" not in text, "the answers would end their block on the page"
    return text


def main() -> None:
    """Put the transcript into its place on the page."""
    text = transcript()
    page, places = RECORDED.subn(lambda found: f"{found[1]}{text}\n```", PAGE.read_text(encoding="utf-8"))
    assert places == 1, f"{PAGE} has {places} places for the transcript"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
