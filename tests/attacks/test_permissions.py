"""Files and folders that may not be read or written: told in a line that says so, and nothing changes."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.sandbox import INDEX, SAVED, Sandbox, World, changes, hash_tree
from support.short_part import short_part

READ_ONLY, NONE = 0o500, 0o000

INSPECT = ("inspect", "-i", INDEX, "--model", "model")
ASK = ("generate", "Why?", "-i", INDEX, "--model", "model", "--method", "squeezed", "--max-new-tokens", "2")
REPORT = ("recall-report", "-i", INDEX)
APPEND = ("append", "more.txt", "-i", INDEX, "--model", "model", "--rebuild")
BUILD = ("build-index", "doc.txt", "-o", INDEX, "--model", "model", "--method", "squeezed", "--max-tokens", "300")
TUNE = ("tune", "-i", INDEX, "--target-recall", "0.5", "--method", "quest")
SAVE = (*ASK, "--save-to", SAVED)

CASES = {
    "the index": (INDEX, NONE, (INSPECT, ASK, REPORT, APPEND, BUILD, TUNE)),
    "the manifest": (f"{INDEX}/manifest.json", NONE, (INSPECT, ASK, APPEND, BUILD)),
    "the tokens": (f"{INDEX}/tokens.safetensors", NONE, (ASK, APPEND)),
    "keys and values": (f"{INDEX}/context/layer_001.safetensors", NONE, (ASK, REPORT, APPEND, SAVE)),
    "a method's folder": (f"{INDEX}/squeezed", NONE, (INSPECT, ASK, APPEND)),
    "an index to write": (INDEX, READ_ONLY, (APPEND, BUILD, TUNE)),
    "a folder to write": (f"{INDEX}/context", READ_ONLY, (APPEND, BUILD)),
    "a home to write": ("", READ_ONLY, (SAVE,)),
    "the document": ("doc.txt", NONE, (BUILD,)),
    "the weights": ("model/model.safetensors", NONE, (ASK, BUILD)),
    "the model's config": ("model/config.json", NONE, (ASK, BUILD)),
    "the model": ("model", NONE, (ASK, BUILD)),
}
"""Paths without permission, by description, and the commands that need them."""


@pytest.fixture
def with_model(world: World, tmp_path: Path) -> Iterator[Sandbox]:
    """A home with a model of its own; can be removed afterwards."""
    sandbox = world.copy(tmp_path / "home")
    shutil.copytree(sandbox.model, sandbox.home / "model")
    yield replace(sandbox, model=sandbox.home / "model")
    sandbox.home.chmod(0o700)


@pytest.mark.parametrize(
    ("path", "mode", "arguments"),
    short_part(
        [
            pytest.param(path, mode, command, id=f"{name}-{command[0]}{'-save' * (command is SAVE)}")
            for name, (path, mode, commands) in CASES.items()
            for command in commands
        ],
        every=5,
    ),
)
def test_what_is_not_permitted_is_told(with_model: Sandbox, path: str, mode: int, arguments: tuple[str, ...]) -> None:
    before = hash_tree(with_model.home)
    (with_model.home / path).chmod(mode)
    run = with_model.run(*arguments, unprivileged=True)
    (with_model.home / path).chmod(0o700)
    run.assert_harmless()
    assert re.search("permission|not (readable|writable)", run.told().lower()), run
    after = hash_tree(with_model.home)
    changed = [name for name in changes(before, after, "cache/named_models.json") if name in before]
    assert not changed, changed
