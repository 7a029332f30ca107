"""Attacks: runs of the command on indices that are hostile or damaged, in a way that a seed determines."""

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
    """Damage an index, in the same way for equal seeds; consecutive seeds take the kinds of damage in turn."""
    damagers = KINDS[kind]
    return damagers[seed % len(damagers)](index, random.Random(f"{kind} {seed}"))


def attack(sandbox: Sandbox, done: Damage, command: Attacked, seed: int) -> None:
    """Run a command on a damaged index.

    Fail unless it succeeds, or ends with one error line, and changes only its own files.
    """
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
    """Return the fault of a command on one damaged index; None without a fault. Removes the home folder at the end."""
    sandbox = world.copy(home)
    done = damage(sandbox.index, kind, seed)
    try:
        attack(sandbox, done, command, seed)
    except AssertionError as wrong:
        return f"{kind} {seed}, {command.name}: {done}\n{wrong}"
    finally:
        shutil.rmtree(home)
    return None
