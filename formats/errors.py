"""Errors that a user can cause, each shown as one line on stderr with an exit code."""


class SparsekvError(Exception):
    """A failure while running; the message says what failed and what to do. Exit code 1."""

    exit_code = 1


class UsageError(SparsekvError):
    """The command was called wrongly (an unknown name, a value out of range). Exit code 2."""

    exit_code = 2


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
