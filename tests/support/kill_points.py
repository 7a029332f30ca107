"""Kills of the real command before each of its file operations in turn, and checks after each kill."""

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from .forked import Run
from .sandbox import CACHE, INDEX, Sandbox, World, changes, hash_tree


@dataclass(frozen=True)
class Killed:
    """A command to kill: its run, its preparation of the home folder, the files it may change, and the index it
    makes."""

    run: Callable[..., Run]
    prepare: Callable[[Sandbox], None] = lambda sandbox: None
    may_change: tuple[str, ...] = (INDEX,)
    makes: str = INDEX


def content(index: Path) -> dict[str, Any]:
    """Return the content of an index, without the fields that depend on when and how it was made."""
    fields = json.loads((index / "manifest.json").read_bytes())
    same = {name: fields[name] for name in ("prompt", "split", "methods", "defaults", "model", "layers")}
    return same | {"files": {name: record["sha256"] for name, record in fields["files"].items()}}


def verify(sandbox: Sandbox, index: str) -> None:
    """Fail unless every checksum of an index is right."""
    verified = sandbox.run("inspect", "-i", index, "--verify", "-q", "--model", sandbox.model)
    assert verified.code == 0, verified


def answer(sandbox: Sandbox, index: str) -> str:
    """Return an index's answer to a question."""
    asked = sandbox.run(
        "generate", "And 5?", "-i", index, "--model", sandbox.model, "--method", "multipole", "--max-new-tokens", "8"
    )
    assert asked.code == 0, asked
    return asked.stdout


@dataclass(frozen=True)
class Undisturbed:
    """Results of a run that was not killed.

    They are the index's answer before the run, the answer of the index that the run made, and that index's content.
    """

    before: str | None
    after: str
    made: dict[str, Any]


def undisturbed(world: World, home: Path, killed: Killed) -> Undisturbed:
    """Run a command to its end, and return its results."""
    sandbox = world.copy(home)
    killed.prepare(sandbox)
    before = answer(sandbox, INDEX) if sandbox.index.exists() else None
    run = killed.run(sandbox)
    assert run.code == 0, run
    return Undisturbed(before, answer(sandbox, killed.makes), content(sandbox.home / killed.makes))


def assert_nothing_is_lost(world: World, folder: Path, killed: Killed, *, every: int) -> None:
    """Kill a command before every `every`-th file operation until a run ends before its kill; check the home after
    each."""
    expected = undisturbed(world, folder / "undisturbed", killed)
    for number in count(every, every):
        sandbox = world.copy(folder / f"{number}")
        killed.prepare(sandbox)
        tree = hash_tree(sandbox.home)
        run = killed.run(sandbox, kill_before=number)
        try:
            _assert_as_before_or_after(sandbox, killed, expected)
            _assert_repeated(sandbox, killed, expected)
            assert not (changed := changes(tree, hash_tree(sandbox.home), *killed.may_change, CACHE)), changed
        except AssertionError as error:
            raise AssertionError(f"killed before operation {number}: {error}") from error
        if run.code != -signal.SIGKILL:
            assert run.code == 0, run
            assert number > every, "no kill came before its end"
            return


def _assert_as_before_or_after(sandbox: Sandbox, killed: Killed, expected: Undisturbed) -> None:
    if expected.before is not None:
        answers = {expected.before, expected.after} if killed.makes == INDEX else {expected.before}
        verify(sandbox, INDEX)
        assert answer(sandbox, INDEX) in answers


def _assert_repeated(sandbox: Sandbox, killed: Killed, expected: Undisturbed) -> None:
    """Check that the same command again makes the same index, unless the index that it should save is already
    complete."""
    made = sandbox.home / killed.makes
    if killed.makes == INDEX or not made.exists():
        repeated = killed.run(sandbox)
        assert repeated.code == 0, repeated
    assert content(made) == expected.made, "the repeated command made another index"
    verify(sandbox, killed.makes)
    left = [path.name for path in made.rglob("*") if path.suffix == ".tmp" or path.name == "unfinished.json"]
    assert not left, left
