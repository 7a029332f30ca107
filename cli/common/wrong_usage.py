"""What to do about a command line that typer does not understand, in one line.

Imports nothing heavy: it must work when an import itself has failed.
"""

from collections.abc import Sequence

from sparsekv.formats.hints import command as shown

EXTRA = "Got unexpected extra argument"


def described_usage(message: str, command: str, arguments: Sequence[str]) -> str:
    """Typer's message with a remedy.

    Args:
        command: the command that was called, or empty.
        arguments: of the whole call.
    """
    message = message.replace("Value error, ", "").rstrip(".")
    named = next((one for one in arguments if one.rstrip("/").endswith(".skv")), None)
    if message.startswith(EXTRA) and named is not None and "--index" not in arguments and "-i" not in arguments:
        return f"{message}; an index is named by an option: --index {named}"
    return f"{message}; {shown(*filter(None, [command]), '--help')} says what there is"
