"""`kill -9` before each file operation of what writes: nothing is lost, and the same command again finishes it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.forked import Run, zygote
from support.kill_points import Killed, assert_nothing_is_lost
from support.sandbox import DOCUMENT, INDEX, SAVED, Sandbox, World


def _without_index(sandbox: Sandbox) -> None:
    shutil.rmtree(sandbox.index)


def _edit(sandbox: Sandbox) -> None:
    """The second half of the document: what is before it is kept."""
    (sandbox.home / "doc.txt").write_text(DOCUMENT.replace("Line 11 ", "Line eleven "))


COMMANDS = {
    "a build": Killed(Sandbox.build, _without_index),
    "an edit": Killed(Sandbox.build, _edit),
    "--force": Killed(lambda sandbox, **how: sandbox.build("--force", **how), _edit),
    "append": Killed(Sandbox.append),
    "--save-to": Killed(
        lambda sandbox, **how: sandbox.ask("--save-to", SAVED, **how), may_change=(SAVED,), makes=SAVED
    ),
    "convert": Killed(
        lambda sandbox, **how: sandbox.run("convert", INDEX, "-o", SAVED, **how), may_change=(SAVED,), makes=SAVED
    ),
    "tune": Killed(
        lambda sandbox, **how: sandbox.run(*("tune", "-i", INDEX, "--target-recall", "0.5", "--method", "quest"), **how)
    ),
}
"""Every command that writes an index."""


@pytest.fixture(scope="session")
def small_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world whose index has one method, so that it has fewer files."""
    return World.make(tmp_path_factory.mktemp("small_world"), zygote(), methods=("multipole",))


DAILY = [name if name != "an edit" else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]
"""An edit of one document is a case of an edited folder's, which is killed below."""


@pytest.mark.parametrize("name", DAILY)
def test_some_kills_lose_nothing(small_world: World, tmp_path: Path, name: str) -> None:
    assert_nothing_is_lost(small_world, tmp_path, COMMANDS[name], every=2 if name == "tune" else 72)


def _build_folder(sandbox: Sandbox, *options: str, **how: Any) -> Run:
    command = ("build-index", "project", "-o", INDEX, "--model", sandbox.model, "--method", "multipole")
    return sandbox.run(*command, *options, **how)


def _edit_folder(sandbox: Sandbox) -> None:
    """A file in the middle is edited, one is added at the front and one is gone."""
    project = sandbox.home / "project"
    (project / "b.txt").write_text(DOCUMENT[300:].replace("says", "does not say"))
    (project / "_.txt").write_text("A file that is new.\n")
    (project / "d.txt").unlink()


FOLDERS = {"a folder": Killed(_build_folder, _without_index), "an edited folder": Killed(_build_folder, _edit_folder)}


@pytest.fixture(scope="session")
def folder_world(small_world: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Whose index is that of a folder, with changed files last."""
    sandbox = small_world.copy(tmp_path_factory.mktemp("folder_world") / "home")
    (sandbox.home / "project").mkdir()
    for number, name in enumerate("abcd"):
        (sandbox.home / "project" / f"{name}.txt").write_text(DOCUMENT[number * 100 :])
    built = _build_folder(sandbox, "--force", "--order", "changed-last")
    assert built.code == 0, built
    return World(sandbox)


def test_some_kills_lose_no_folder(folder_world: World, tmp_path: Path) -> None:
    assert_nothing_is_lost(folder_world, tmp_path, FOLDERS["an edited folder"], every=72)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_no_kill_loses_a_folder(folder_world: World, tmp_path: Path, name: str) -> None:
    assert_nothing_is_lost(folder_world, tmp_path, FOLDERS[name], every=1)


@pytest.fixture(scope="session")
def world_with_states(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world whose model has layers with a state, and whose index has one method and checkpoints."""
    folder, options = tmp_path_factory.mktemp("states_world"), ("--checkpoints", "1")
    return World.make(folder, zygote(), ("multipole",), options, "qwen3_next")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["an edit", "append"])
def test_some_kills_lose_no_state(world_with_states: World, tmp_path: Path, name: str) -> None:
    assert_nothing_is_lost(world_with_states, tmp_path, COMMANDS[name], every=72)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_no_kill_loses_anything(world: World, tmp_path: Path, name: str) -> None:
    assert_nothing_is_lost(world, tmp_path, COMMANDS[name], every=1)
