"""Every command on hostile and damaged indices: it is done or told in a line, and only the index's own files change."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

import pytest
from support.hostile import KINDS, attack_once
from support.sandbox import COMMANDS, Attacked, World

INDICES = int(os.environ.get("SPARSEKV_ATTACKS", "2000"))
AT_ONCE = 2
SHORT = 14

SOME = [
    pytest.param(kind, seed, command, id=f"{kind}-{seed}-{command.name}")
    for kind, commands in zip(KINDS, (cycle(COMMANDS), cycle(COMMANDS[::-1]), cycle(COMMANDS[2:])), strict=True)
    for seed, command in enumerate(islice(commands, SHORT))
]


@pytest.mark.parametrize(("kind", "seed", "command"), SOME)
def test_an_index_from_a_stranger_is_harmless(
    world: World, tmp_path: Path, kind: str, seed: int, command: Attacked
) -> None:
    wrong = attack_once(world, tmp_path / "home", kind, seed, command)
    assert wrong is None, wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_indices_from_strangers_are_harmless(world: World, tmp_path: Path, kind: str) -> None:
    """As many as SPARSEKV_ATTACKS says, through every command; what went wrong is told at the end, all of it."""

    def attacks() -> Iterator[tuple[int, Attacked]]:
        return ((seed, command) for seed in range(INDICES // len(KINDS)) for command in COMMANDS)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        outcomes = threads.map(
            lambda one: attack_once(world, tmp_path / f"{one[0]} {one[1].name}", kind, *one), attacks()
        )
        wrong = [outcome for outcome in outcomes if outcome is not None]
    (tmp_path / "wrong.txt").write_text("\n\n".join(wrong))
    assert not wrong, f"{len(wrong)} went wrong, see {tmp_path / 'wrong.txt'}; the first:\n{wrong[0]}"
