"""Helpers for chats on a terminal over the tiny index of tests/cli."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .dialogue import Dialogue, dialogue

PROMPT = r"\x1b\[\?2004h> "
"""Pattern of the chat's prompt, after the escape sequence by which readline turns on bracketed paste."""
ENTERED = "\x1b[?2004l"
"""Escape sequence after an entry, by which readline turns off bracketed paste."""
ANSWER = 8
FRAME = "<|end|>\n<|start|>user\n<|end|>\n<|start|>assistant\n"
"""Text of the chat template around a question that follows an answer which was cut."""


@contextmanager
def chat(place: Path, *options: str) -> Iterator[Dialogue]:
    """Start a chat over the tiny index, and yield it when it waits for its first question."""
    short = () if "--max-new-tokens" in options else ("--max-new-tokens", str(ANSWER))
    with dialogue("chat", "--model", "model", *short, *options, cwd=place) as one:
        one.until(PROMPT)
        yield one


def answer(one: Dialogue, entry: str) -> str:
    """Send an entry, and return the text that is shown up to the next prompt."""
    one.send(f"{entry}\r")
    return shown(one)


def shown(one: Dialogue) -> str:
    """Return the text that is shown up to the next prompt, without the typed line."""
    return one.until(PROMPT).rpartition(ENTERED)[2].lstrip("\r")


def tokens(frame: str, text: str = "") -> int:
    """Return the number of the tiny tokenizer's tokens in a text: one for each byte, and one for each special token."""
    return len(re.sub(r"<\|\w+\|>", "x", frame + text).encode())


def prompt_tokens(said: str) -> int:
    """Return the number of prompt tokens that --stats has printed."""
    found = re.search(r"([\d,]+) prompt tokens", said)
    assert found is not None, said
    return int(found[1].replace(",", ""))


def cut(tokens: int = ANSWER) -> str:
    """Return the line that follows an answer of the maximum length."""
    return f"the answer was cut after {tokens:,} token{'s' * (tokens != 1)} (--max-new-tokens)\n"
