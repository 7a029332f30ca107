"""One bit of what a method built is another one: the user is told, or the answer is the same."""

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from support.hostile_tensors import flip_bit
from support.sandbox import METHODS, PREFILLS, World
from support.sealing import read_fields

FLIPS = 500
AT_ONCE = 2
SHORT = (
    ("squeezed", 12),
    ("squeezed", 84),
    ("multipole", 25),
    ("multipole", 43),
    ("multipole", 79),
    ("multipole-windowed", 8),
    ("csattention", 21),
    ("pqcache", 4),
    ("codes", 3),
    ("h2o", 5),
)
"""Bits that were followed out of a tensor once, or changed an answer in silence; and others."""


@cache
def _undamaged(world: World, *options: str) -> str:
    answered = world.original.ask(*options)
    assert answered.code == 0, answered
    return answered.stdout


def _flip_and_ask(world: World, home: Path, method: str, seed: int, *, sealed: bool) -> str | None:
    """Return the failure's description, or None. An index whose sums fit the flipped bit is another index and may
    answer otherwise."""
    sandbox, choose = world.copy(home), random.Random(f"{method} {seed}")
    name = choose.choice(
        [name for name in sorted(read_fields(sandbox.index)["files"]) if name.startswith(f"{method}/")]
    )
    done = flip_bit(sandbox.index, name, choose, sealed=sealed)
    options = ("--method", method, *choose.choice(PREFILLS))
    answered = sandbox.ask(*options)
    shutil.rmtree(home)
    try:
        answered.assert_harmless()
        assert sealed or answered.code or answered.stdout == _undamaged(world, *options), f"another answer: {answered}"
    except AssertionError as wrong:
        return f"{method} {seed}: {done}\n{wrong}"
    return None


@pytest.mark.thinned
@pytest.mark.parametrize("sealed", [False, True], ids=["damaged", "sealed"])
@pytest.mark.parametrize(("method", "seed"), SHORT)
def test_a_flipped_bit_is_told_or_harmless(world: World, tmp_path: Path, method: str, seed: int, sealed: bool) -> None:
    wrong = _flip_and_ask(world, tmp_path / "home", method, seed, sealed=sealed)
    assert wrong is None, wrong


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [False, True], ids=["damaged", "sealed"])
def test_hundreds_of_flipped_bits_are_told_or_harmless(world: World, tmp_path: Path, sealed: bool) -> None:
    """Each flipped bit is refused or leaves the answer as it was. All failures are collected and written to a file at
    the end."""

    def flips() -> Iterator[tuple[str, int]]:
        return ((METHODS[number % len(METHODS)], number) for number in range(FLIPS))

    with ThreadPoolExecutor(AT_ONCE) as threads:
        outcomes = threads.map(
            lambda flip: _flip_and_ask(world, tmp_path / f"{flip[1]}", *flip, sealed=sealed), flips()
        )
        wrong = [outcome for outcome in outcomes if outcome is not None]
    (tmp_path / "wrong.txt").write_text("\n\n".join(wrong))
    assert not wrong, f"{len(wrong)} went wrong, see {tmp_path / 'wrong.txt'}; the first:\n{wrong[0]}"
