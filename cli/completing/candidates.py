"""What may come next on a command line."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from sparsekv.cli.completing.known import KnownCommand, KnownOption
from sparsekv.formats.models.model_names import named_models


@dataclass
class Candidates:
    """Words that may stand in the place of the incomplete one, each with a line about it.

    files: `file` or `folder` where a name of one may stand there too, which the shell completes best.
    """

    words: dict[str, str] = field(default_factory=dict)
    files: str = ""


def candidates(program: KnownCommand, words: list[str], incomplete: str) -> Candidates:
    """What may follow the complete words (without the program's name) and begins with the incomplete one."""
    line = _Line(program)
    for word in words:
        line.take(word)
    return line.complete(incomplete)


class _Line:
    """Where on a command line one is: in which command, after which option."""

    def __init__(self, program: KnownCommand):
        self.command, self.known = program, True
        self.awaiting: KnownOption | None = None
        self.position, self.only_arguments = 0, False
        self.used: list[KnownOption] = []
        self.methods: set[str] = set()

    def take(self, word: str) -> None:
        """Go on past a complete word."""
        if self.awaiting is not None:
            self._value(self.awaiting, word)
            self.awaiting = None
        elif word == "--" and not self.only_arguments:
            self.only_arguments = True
        elif word.startswith("-") and word != "-" and not self.only_arguments:
            self._option(word)
        elif self.command.commands:
            self.known = self.known and word in self.command.commands
            self.command, self.used = self.command.commands.get(word, self.command), []
        else:
            self.position += 1

    def _option(self, word: str) -> None:
        name, equals, value = word.partition("=")
        option = next((one for one in self.command.options if name in one.names), None)
        if option is None:
            return
        self.used.append(option)
        if equals:
            self._value(option, value)
        elif option.value != "none":
            self.awaiting = option

    def _value(self, option: KnownOption, value: str) -> None:
        if any(name in ("--method", "--prefill", "--question-prefill") for name in option.names):
            self.methods.add(value)

    def complete(self, incomplete: str) -> Candidates:
        """What may stand in the place of the incomplete word."""
        if not self.known:
            return Candidates()
        if self.awaiting is not None:
            return _values(self.awaiting, incomplete)
        if incomplete.startswith("-") and not self.only_arguments:
            name, equals, value = incomplete.partition("=")
            option = next((one for one in self.command.options if name in one.names), None)
            if equals and option is not None:
                return _values(option, value, before=f"{name}=")
            return Candidates(self._options(incomplete))
        if self.command.commands:
            below = self.command.commands
            return Candidates({name: one.help for name, one in below.items() if name.startswith(incomplete)})
        here = self.command.arguments[self.position : self.position + 1]
        found = _values(here[0], incomplete) if here else Candidates()
        if not (incomplete or found.words or found.files or self.only_arguments):
            found.words = self._options("--")
        return found

    def _options(self, incomplete: str) -> dict[str, str]:
        """Long options, or a short one that is whole; without those that were given, or are of other methods."""
        shown = [one for one in self.command.options if self._possible(one)]
        found = {name: one.help for one in shown for name in one.names if name.startswith(incomplete)}
        return {name: text for name, text in found.items() if name.startswith("--") or name == incomplete}

    def _possible(self, option: KnownOption) -> bool:
        of_another = bool(option.owners and self.methods) and self.methods.isdisjoint([*option.owners, "all"])
        return not of_another if option.repeatable else option not in self.used and not of_another


def _values(option: KnownOption, incomplete: str, before: str = "") -> Candidates:
    """Values of an option that begin so; `before` is put before each word."""
    words: Iterable[str] = option.choices
    files = ""
    if option.value == "index":
        words = _indices(incomplete)
    elif option.value == "model":
        words, files = [*option.choices, *filter(str.isprintable, named_models())], "folder"
    elif option.value in ("file", "folder"):
        files = option.value
    found = {f"{before}{word}": "" for word in words if word.startswith(incomplete)}
    return Candidates(found, files)


def _indices(incomplete: str) -> list[str]:
    """Index folders, and with a slash the folders that they may lie in; names that no shell shows well are left out."""
    head, slash, tail = incomplete.rpartition("/")
    folders = (entry.name for entry in os.scandir(os.path.expanduser(head) or slash or ".") if entry.is_dir())
    shown = (name for name in folders if name.isprintable() and (tail or not name.startswith(".")))
    found = (f"{head}{slash}{name}{'' if name.endswith('.skv') else '/'}" for name in shown if name.startswith(tail))
    return sorted(found, key=lambda name: (name.endswith("/"), name))
