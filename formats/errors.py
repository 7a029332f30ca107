"""Errors that a user can cause, each one line on stderr with an exit code and a remedy."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

NEAR = 70.0
"""The least similarity, of 100, at which a name is suggested: one or two letters of a word differ."""


def suggestion(given: str, known: Iterable[str]) -> str:
    """` (did you mean NAME?)` with the known name that is most like the given one; empty where none is."""
    near = nearest(given, known)
    return "" if near is None else f" (did you mean {near}?)"


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The known name that is most like the given one; None where none is."""
    from rapidfuzz import fuzz, process  # here: --help need not wait for it

    names = [*known]
    # Letters in common first: `code` is in tidaldecode as a whole, and nearer to codes.
    for alike in (fuzz.ratio, fuzz.WRatio):
        found = process.extractOne(given, names, scorer=alike, score_cutoff=NEAR, processor=str.lower)
        if found is not None:
            return str(found[0])
    return None


def choose_one(given: str, known: Iterable[str]) -> str:
    """`choose one of A, B, C`, and which of them may have been meant."""
    names = [*known]
    return f"choose one of {', '.join(names)}{suggestion(given, names)}"


def reason_of(error: BaseException) -> str:
    """Why a system refused something, in its own words."""
    return (getattr(error, "strerror", None) or str(error)).lower()


class SparsekvError(Exception):
    """A failure while running; the message says what failed and what to do. Exit code 1."""

    exit_code = 1


class UsageError(SparsekvError):
    """The command was called wrongly (an unknown name, a value out of range). Exit code 2."""

    exit_code = 2


def check_choice(option: str, given: str, known: Iterable[str]) -> None:
    """Raise UsageError for a value that an option does not have."""
    names = [*known]
    if given not in names:
        raise UsageError(f"{option} {given}: {choose_one(str(given), names)}")


def check_at_least_one(parameters: object, *names: str) -> None:
    """Raise UsageError for the first of these parameters below 1, by the name of its option."""
    for name in names:
        if (value := getattr(parameters, name)) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: give at least 1")


class ArtifactError(SparsekvError):
    """An index is unfinished, damaged, newer than this version, or not writable."""


class MissingIndexError(ArtifactError):
    """There is no index at the path that was named: wrong usage, as with any file that is not there. Exit code 2."""

    exit_code = 2


class IdentityError(SparsekvError):
    """An index does not belong to this model, tokenizer or chat template."""

    def __init__(self, field: str, built_with: object, found: object, remedy: str):
        self.field, self.built_with, self.found = field, built_with, found
        super().__init__(f"{field} differs: the index was built with {built_with}, this is {found}; {remedy}")


@dataclass(frozen=True)
class WaysOut:
    """Remedies to suggest besides freeing disk space; empty where a command has no such option."""

    elsewhere: str = "choose another folder with --output"
    less: str = "shorten the document with --max-tokens"

    def no_space(self, folder: Path, size: int, free: int) -> ArtifactError:
        ways = ", or ".join(part for part in ("make room", self.elsewhere, self.less) if part)
        return ArtifactError(f"{folder} needs {size / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB free; {ways}")

    def cannot_write(self, folder: Path, error: OSError) -> ArtifactError:
        ways = ", or ".join(part for part in ("make room or permission there", self.elsewhere) if part)
        return ArtifactError(f"cannot write {folder}: {reason_of(error)}; {ways}, and run the same command again")
