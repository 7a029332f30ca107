"""A small home folder with an index and other files, and checks of changes in it."""

import hashlib
import os
import random
import shutil
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .causal_families import save_family
from .forked import Run, Started, Zygote

DOCUMENT = "".join(f"Line {number} says that {number} times {number} is {number * number}.\n" for number in range(12))
MORE = "And one line more.\n"
QUESTION = "What is 7 times 7?"
INDEX, SAVED = "mail/doc.skv", "saved.skv"
CACHE = "cache"
"""Subfolder of the home for the command's cache."""
METHODS = ("squeezed", "multipole", "multipole-windowed", "csattention", "pqcache", "codes", "h2o")
PREFILLS = (("--prefill", "own"), ())
"""Options of a question's prefill. By default a question reads nothing of the method, so a wrong offset shows in the
first decode step."""
VICTIMS = {
    ".bashrc": b"alias ll='ls -l'\n",
    "notes.txt": b"remember the milk\n",
    "mail/.bashrc": b"alias ls='rm'\n",
    "mail/notes.txt": b"yours sincerely\n",
    "mail/a model/manifest.json": b'{"name": "of a model"}',
    "mail/a model/model.safetensors": b"weights",
    "mail/a model/config.json": b"{}",
    "mail/layers/layer_000.safetensors": b"somebody else's",
    "mail/layers/download.tmp": b"half of something",
}
"""Files around the index, and around the place where an index is saved, that no command may touch."""

Tree = dict[str, str]


def hash_tree(root: Path) -> Tree:
    """Return the content of every path below a folder: a file's sha256, a link's target, or the type of anything
    else."""
    return {str(path.relative_to(root)): _what(path) for path in sorted(root.rglob("*"))}


def _what(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"link to {os.readlink(path)}"
    if stat.S_ISREG(mode):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return stat.filemode(mode)[0]


def changes(before: Tree, after: Tree, *allowed: str) -> list[str]:
    """Return the paths that have changed, except the allowed paths and paths below them."""
    differing = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    return sorted(path for path in differing if not any(Path(path).is_relative_to(name) for name in allowed))


@dataclass(frozen=True)
class Sandbox:
    """A home folder to run commands in.

    `model` is outside of the home. `methods` are the methods that `build` builds.
    """

    home: Path
    model: Path
    zygote: Zygote
    methods: tuple[str, ...] = METHODS

    @property
    def index(self) -> Path:
        return self.home / INDEX

    def start(self, *arguments: str | Path, **how: Any) -> Started:
        """Start a command in the home, with the arguments of `Zygote.start`."""
        environment = {"HOME": str(self.home), "SPARSEKV_CACHE": str(self.home / CACHE), **how.pop("environment", {})}
        return self.zygote.start(*arguments, folder=self.home, environment=environment, **how)

    def run(self, *arguments: str | Path, **how: Any) -> Run:
        """Run a command in the home to its end."""
        return self.start(*arguments, **how).wait()

    def build(self, *options: str, **how: Any) -> Run:
        """Run `build-index` on the document."""
        methods = [option for method in self.methods for option in ("--method", method)]
        return self.run("build-index", "doc.txt", "-o", INDEX, "--model", self.model, *methods, *options, **how)

    def append(self, *options: str, **how: Any) -> Run:
        """Run `append` with one line of text."""
        return self.run("append", "more.txt", "-i", INDEX, "--model", self.model, "--rebuild", *options, **how)

    def ask(self, *options: str, **how: Any) -> Run:
        """Run `generate` for a few tokens."""
        return self.run(*self.asking(*options), **how)

    def asking(self, *options: str) -> tuple[str | Path, ...]:
        """Return the arguments of the command that `ask` runs."""
        return ("generate", QUESTION, "-i", INDEX, "--model", self.model, "--max-new-tokens", "8", *options)


@dataclass(frozen=True)
class World:
    """A sandbox that is copied for each test."""

    original: Sandbox

    @classmethod
    def make(
        cls,
        folder: Path,
        zygote: Zygote,
        methods: tuple[str, ...] = METHODS,
        options: tuple[str, ...] = (),
        family: str = "llama",
    ) -> "World":
        """Write all files, and build the index with the real command and these options."""
        model, home = save_family(folder / "model", family), folder / "home"
        for name, content in VICTIMS.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_bytes(content)
        (home / "doc.txt").write_text(DOCUMENT)
        (home / "more.txt").write_text(MORE)
        original = Sandbox(home, model, zygote, methods)
        built = original.build(*options)
        assert built.code == 0, built
        return cls(original)

    def copy(self, home: Path) -> Sandbox:
        """Return a sandbox with a copy of the original's home."""
        shutil.copytree(self.original.home, home, symlinks=True)
        return replace(self.original, home=home)


@dataclass(frozen=True)
class Attacked:
    """A command that runs on a hostile index, and the paths that it may change in the home.

    `reports` is True if the command prints its own text, not a model's.
    """

    name: str
    may_change: tuple[str, ...] = ()
    reports: bool = True

    def arguments(self, sandbox: Sandbox, seed: int) -> tuple[str | Path, ...]:
        """Return the command's arguments; the seed chooses a method and a prefill."""
        if self.name == "inspect":
            return ("inspect", "-i", INDEX, "--model", sandbox.model)
        if self.name == "recall-report":
            return ("recall-report", "-i", INDEX, "--budget", "10%")
        if self.name == "convert":
            return ("convert", INDEX, "-o", SAVED)
        if self.name == "append":
            return ("append", "more.txt", "-i", INDEX, "--model", sandbox.model, "--rebuild")
        choose = random.Random(seed)
        options = ("--method", choose.choice(METHODS), *choose.choice(PREFILLS))
        save = ("--save-to", SAVED) if self.name == "save-to" else ()
        return sandbox.asking(*options, *save)


COMMANDS = (
    Attacked("inspect"),
    Attacked("generate", reports=False),
    Attacked("recall-report"),
    Attacked("append", (INDEX,)),
    Attacked("convert", (SAVED,)),
    Attacked("save-to", (SAVED,), reports=False),
)
