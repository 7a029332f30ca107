"""The commands of a chat by name: what a line that begins with / means."""

from collections.abc import Callable
from dataclasses import dataclass

from rapidfuzz import process
from rapidfuzz.distance import DamerauLevenshtein

from sparsekv.cli.chatting.session import Session
from sparsekv.formats.errors import UsageError

ALIKE = 0.5
"""How alike an unknown name and a command's are, of 1, so that the one may have been meant for the other."""


@dataclass(frozen=True)
class Slash:
    """A command: its name, what is written behind it, what it does in a sentence, and the function that does it."""

    name: str
    argument: str
    help: str
    run: Callable[[Session, str], None]

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()


COMMANDS: dict[str, Slash] = {}
"""All of them, in the order in which /help lists them."""


def slash(usage: str, told: str) -> Callable[[Callable[[Session, str], None]], Callable[[Session, str], None]]:
    """Decorator of a function of the session and what stands behind the command: registers it.

    Args:
        usage: as in `/budget B`.
        told: what /help says of it.
    """
    name, _, argument = usage.removeprefix("/").partition(" ")

    def register(run: Callable[[Session, str], None]) -> Callable[[Session, str], None]:
        COMMANDS[name] = Slash(name, argument, told, run)
        return run

    return register


def is_command(entry: str) -> bool:
    """Whether an entry is a command: pasted text of several lines never is, and // begins a question with /."""
    return entry.startswith("/") and not entry.startswith("//") and "\n" not in entry


def as_question(entry: str) -> str:
    """The question that an entry asks, which is no command."""
    return entry[1:] if entry.startswith("//") and "\n" not in entry else entry


def run_command(session: Session, entry: str) -> None:
    """Run a command as it was typed.

    Raises:
        UsageError: there is no such command; and whatever it raises itself.
    """
    name, _, argument = entry.removeprefix("/").partition(" ")
    if name not in COMMANDS:
        alike = DamerauLevenshtein.normalized_similarity
        nearest = process.extractOne(name, list(COMMANDS), scorer=alike, score_cutoff=ALIKE)
        meant = "/help lists them" if nearest is None else f"did you mean /{nearest[0]}?"
        raise UsageError(f"no command /{name}: {meant} (a question that begins with / is written //)")
    COMMANDS[name].run(session, argument.strip())


def completions(line: str) -> list[str]:
    """The commands that a line may go on to be."""
    return [f"/{name}" for name in COMMANDS if line.startswith("/") and f"/{name}".startswith(line)]
