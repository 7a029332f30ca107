"""Haystacks: sentences of any text, as many as fit, with others put between them."""

import random
import re
from collections.abc import Callable

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.evaluation.tasks import CountTokens

LONGEST_SENTENCE = 400  # characters; tables and code have no full stops


def sentences(text: str) -> list[str]:
    """Sentences of a text, white space made one space; what is longer than 400 characters is cut between words."""
    flat = " ".join(text.split())
    found = []
    for sentence in re.split(r"(?<=[.!?])\s", flat):
        while len(sentence) > LONGEST_SENTENCE:
            cut = sentence.rfind(" ", 1, LONGEST_SENTENCE)
            cut = LONGEST_SENTENCE if cut < 0 else cut
            found.append(sentence[:cut])
            sentence = sentence[cut:].lstrip()
        if sentence:
            found.append(sentence)
    return found


def rotated(units: list[str], random_numbers: random.Random) -> list[str]:
    """The sentences from a random one on, and then those before it, so that contexts differ."""
    start = random_numbers.randrange(len(units)) if units else 0
    return units[start:] + units[:start]


def largest(fits: Callable[[int], bool], upper: int) -> int:
    """The largest number from 0 to `upper` that fits, where everything below one that fits does; -1 for none."""
    low, high = -1, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def fill(units: list[str], render: Callable[[list[str]], str], count: CountTokens, length: int, task: str) -> list[str]:
    """As many of the units, from the first on, as `render` turns into a text of at most `length` tokens.

    Raises:
        UsageError: not even none of them fit, or all of them leave a quarter of the length empty.
    """
    # Counting a whole book for each guess would take longer than the model does.
    upper = min(len(units), 4 * length)
    size = min(upper, 16)
    while size < upper and count(render(units[:size])) <= length:
        size = min(upper, 2 * size)
    used = largest(lambda number: count(render(units[:number])) <= length, size)
    if used < 0:
        raise UsageError(f"--length {length} is too small for {task}; give more tokens, or fewer --questions")
    if used == len(units) and (tokens := count(render(units))) < 0.75 * length:
        raise UsageError(f"the text has no {length} tokens for --task {task}, only {tokens}; give a longer one")
    return units[:used]


def insert(units: list[str], needles: list[tuple[float, str]]) -> list[str]:
    """The units with needles between them, each where that share of the units' characters is before it."""
    total, before, placed = sum(map(len, units)), 0, []
    waiting = sorted(needles)
    for unit in units:
        # A needle goes to the nearer end of the sentence that its place is in.
        while waiting and waiting[0][0] * total <= before + len(unit) / 2:
            placed.append(waiting.pop(0)[1])
        placed.append(unit)
        before += len(unit)
    return placed + [needle for _, needle in waiting]


def depth_of(text: str, part: str) -> float:
    """Where in a text a part of it begins, from 0 to 1."""
    return text.index(part) / len(text)
