"""Chats over the tiny index of tests/cli, on a terminal, and what they show."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .dialogue import Dialogue, dialogue

PROMPT = r"\x1b\[\?2004h> "
"""Where the command waits, with the mark for pasted text that readline turns on."""
ENTERED = "\x1b[?2004l"
"""What follows an entry."""
ANSWER = 8
FRAME = "<|end|>\n<|start|>user\n<|end|>\n<|start|>assistant\n"
"""What the template puts around a question that follows an answer which was cut off."""


@contextmanager
def chat(place: Path, *options: str) -> Iterator[Dialogue]:
    """A chat over the tiny index that waits for its first question."""
    short = () if "--max-new-tokens" in options else ("--max-new-tokens", str(ANSWER))
    with dialogue("chat", "--model", "model", *short, *options, cwd=place) as one:
        one.until(PROMPT)
        yield one


def answer(one: Dialogue, entry: str) -> str:
    """What is shown after an entry, up to the next prompt."""
    one.send(f"{entry}\r")
    return shown(one)


def shown(one: Dialogue) -> str:
    """What is shown up to the next prompt, without the line that was typed."""
    return one.until(PROMPT).rpartition(ENTERED)[2].lstrip("\r")


def tokens(frame: str, text: str = "") -> int:
    """How many tokens of the tiny tokenizer a text has: one a byte, and one for each special one."""
    return len(re.sub(r"<\|\w+\|>", "x", frame + text).encode())


def prompt_tokens(said: str) -> int:
    """What --stats says of the prompt's length."""
    found = re.search(r"([\d,]+) prompt tokens", said)
    assert found is not None, said
    return int(found[1].replace(",", ""))


def cut(tokens: int = ANSWER) -> str:
    """The line after an answer that was as long as it may be."""
    return f"the answer was cut after {tokens:,} token{'s' * (tokens != 1)} (--max-new-tokens)\n"
