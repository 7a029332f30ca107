"""Haystacks: sentences of any text up to a length in tokens, with needles inserted between them."""

import random
import re
from collections.abc import Callable

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.evaluation.tasks import CountTokens

LONGEST_SENTENCE = 400  # characters; tables and code have no full stops to split at
LEAST_SUGGESTED = 256
"""Tokens of the shortest context that is suggested: of it sinks and tail leave half to index."""


def sentences(text: str) -> list[str]:
    """Sentences of a text with white space collapsed; those longer than 400 characters are cut between words."""
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
    """The sentences rotated to a random start, so that contexts differ."""
    start = random_numbers.randrange(len(units)) if units else 0
    return units[start:] + units[:start]


def largest(fits: Callable[[int], bool], upper: int) -> int:
    """The largest number from 0 to `upper` that fits, by bisection; -1 if none does. `fits` must be monotone."""
    low, high = -1, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def fill(units: list[str], render: Callable[[list[str]], str], count: CountTokens, length: int, task: str) -> list[str]:
    """The longest prefix of the units that `render` turns into a text of at most `length` tokens.

    Raises:
        UsageError: the text is too long even without units, or all units fill less than three quarters of the length.
    """
    # Sizes are doubled from a small start, because tokenising a whole book for each guess is slower than the model.
    upper = min(len(units), 4 * length)
    size = min(upper, 16)
    while size < upper and count(render(units[:size])) <= length:
        size = min(upper, 2 * size)
    used = largest(lambda number: count(render(units[:number])) <= length, size)
    if used < 0:
        raise UsageError(f"--length {length} is too small for {task}; give more tokens, or fewer --questions")
    if used == len(units) and (tokens := count(render(units))) < 0.75 * length:
        shorter = f"--length {tokens}, or " if tokens >= LEAST_SUGGESTED else ""
        raise UsageError(
            f"the text has no {length} tokens for --task {task}, only {tokens} with its questions; give {shorter}a "
            "longer text"
        )
    return units[:used]


def insert(units: list[str], needles: list[tuple[float, str]]) -> list[str]:
    """The units with needles between them, each at its depth: the share of the units' characters before it."""
    total, before, placed = sum(map(len, units)), 0, []
    waiting = sorted(needles)
    for unit in units:
        # A needle goes to the nearer end of the sentence at its depth.
        while waiting and waiting[0][0] * total <= before + len(unit) / 2:
            placed.append(waiting.pop(0)[1])
        placed.append(unit)
        before += len(unit)
    return placed + [needle for _, needle in waiting]


def depth_of(text: str, part: str) -> float:
    """Where a part begins in a text, from 0 to 1."""
    return text.index(part) / len(text)
