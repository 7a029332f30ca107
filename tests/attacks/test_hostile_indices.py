"""Every command on hostile and damaged indices: it is done or told in a line, and only the index's own files change."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import pytest
from support.forked import zygote
from support.hostile import KINDS, attack_once
from support.sandbox import COMMANDS, METHODS, Attacked, World

INDICES = int(os.environ.get("SPARSEKV_ATTACKS", "2000"))
AT_ONCE = 2
SHORT = {
    "manifest": (3, 17, 253, 10, 9, 11, 26, 323, 21, 37, 38, 45, 47, 43, 51, 23, 59, 52, 1, 0),
    "tensors": (12, 32, 16, 17, 10, 22, 27, 43, 7, 52, 34, 42, 3, 30, 0, 1, 2, 267),
    "folder": (1, 6, 9, 3, 12, 14, 21, 0),
}
"""Seeds with which some command went wrong once, and a few others."""
NAMED = {command.name: command for command in COMMANDS}
MOST = {
    "manifest": ("generate", "recall-report", "save-to", "inspect", "append"),
    "tensors": ("recall-report", "append", "generate", "inspect", "save-to"),
    "folder": ("append", "append", "append", "save-to"),
}
"""Commands in turn."""

SOME = [
    pytest.param(kind, seed, NAMED[name], id=f"{kind}-{seed}-{name}")
    for kind, seeds in SHORT.items()
    for seed, name in zip(seeds, cycle(MOST[kind]), strict=False)
]


@pytest.mark.parametrize(("kind", "seed", "command"), SOME)
def test_an_index_from_a_stranger_is_harmless(
    world: World, tmp_path: Path, kind: str, seed: int, command: Attacked
) -> None:
    wrong = attack_once(world, tmp_path / "home", kind, seed, command)
    assert wrong is None, wrong


@pytest.fixture(scope="module")
def int8_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The same with keys and values in 8 bits."""
    return World.make(tmp_path_factory.mktemp("int8_world"), zygote(), options=("--kv-dtype", "int8"))


@pytest.mark.thinned
@pytest.mark.parametrize("command", ["generate", "recall-report", "append", "save-to"])
@pytest.mark.parametrize(("kind", "seed"), [("manifest", 15), ("manifest", 20), ("tensors", 2), ("tensors", 10)])
def test_an_index_in_8_bits_from_a_stranger_is_harmless(
    int8_world: World, tmp_path: Path, kind: str, seed: int, command: str
) -> None:
    wrong = attack_once(int8_world, tmp_path / "home", kind, seed, NAMED[command])
    assert wrong is None, wrong


@pytest.fixture(scope="module")
def world_with_states(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The same of a model with layers that keep a state."""
    options = ("--checkpoints", "1")
    return World.make(tmp_path_factory.mktemp("states"), zygote(), METHODS, options, "qwen3_next")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "command"), list(zip((0, 1, 2, 3, 4, 5, 9, 17, 24, 35), cycle(("append", "generate")), strict=False))
)
def test_a_state_from_a_stranger_is_harmless(world_with_states: World, tmp_path: Path, seed: int, command: str) -> None:
    wrong = attack_once(world_with_states, tmp_path / "home", "states", seed, NAMED[command])
    assert wrong is None, wrong


@pytest.mark.parametrize("seed", [4, 9, 16])
def test_converting_an_index_from_a_stranger_is_harmless(world: World, tmp_path: Path, seed: int) -> None:
    wrong = attack_once(world, tmp_path / "home", "tensors", seed, NAMED["convert"])
    assert wrong is None, wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_indices_from_strangers_are_harmless(
    world: World, world_with_states: World, tmp_path: Path, kind: str
) -> None:
    """As many as SPARSEKV_ATTACKS says, through every command; what went wrong is told at the end, all of it."""
    attacked = world_with_states if kind == "states" else world

    def attacks() -> Iterator[tuple[int, Attacked]]:
        return ((seed, command) for seed in range(INDICES // len(KINDS)) for command in COMMANDS)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        outcomes = threads.map(
            lambda one: attack_once(attacked, tmp_path / f"{one[0]} {one[1].name}", kind, *one), attacks()
        )
        wrong = [outcome for outcome in outcomes if outcome is not None]
    (tmp_path / "wrong.txt").write_text("\n\n".join(wrong))
    assert not wrong, f"{len(wrong)} went wrong, see {tmp_path / 'wrong.txt'}; the first:\n{wrong[0]}"
