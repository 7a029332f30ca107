"""Indices from strangers: hostile or damaged in a way that a seed decides."""

import random
import shutil
from pathlib import Path

from . import hostile_folders, hostile_manifests, hostile_states, hostile_tensors
from .sandbox import INDEX, SAVED, Attacked, Sandbox, World, changes, hash_tree
from .sealing import Damage

KINDS = {
    "manifest": hostile_manifests.DAMAGERS,
    "tensors": hostile_tensors.DAMAGERS,
    "folder": hostile_folders.DAMAGERS,
    "states": hostile_states.DAMAGERS,
}


def damage(index: Path, kind: str, seed: int) -> Damage:
    """Damage an index, always in the same way for a seed; seeds in a row take one way after the other."""
    damagers = KINDS[kind]
    return damagers[seed % len(damagers)](index, random.Random(f"{kind} {seed}"))


def attack(sandbox: Sandbox, done: Damage, command: Attacked, seed: int) -> None:
    """Run a command on a damaged index; fails unless it was done or told, and nothing but its own was changed."""
    before = hash_tree(sandbox.home)
    run = sandbox.run(*command.arguments(sandbox, seed))
    run.assert_harmless()
    assert not command.reports or "\x1b" not in run.stdout, f"an escape sequence: {run}"
    after = hash_tree(sandbox.home)
    touched = changes(before, after, *command.may_change)
    touched += [path for path in changes(before, after) if _is_foreign(path, done)]
    assert not touched, f"changes {', '.join(touched)}: {run}"
    assert run.code == 0 or SAVED not in after, f"leaves {SAVED}: {run}"


def _is_foreign(path: str, done: Damage) -> bool:
    return any(Path(path).is_relative_to(Path(INDEX, name)) for name in done.foreign)


def attack_once(world: World, home: Path, kind: str, seed: int, command: Attacked) -> str | None:
    """What a command on one damaged index did wrong; None where it did nothing wrong. Leaves nothing behind."""
    sandbox = world.copy(home)
    done = damage(sandbox.index, kind, seed)
    try:
        attack(sandbox, done, command, seed)
    except AssertionError as wrong:
        return f"{kind} {seed}, {command.name}: {done}\n{wrong}"
    finally:
        shutil.rmtree(home)
    return None
