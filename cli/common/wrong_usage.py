"""What to do about a command line that typer does not understand, in one line.

Imports nothing heavy: it must work when an import itself has failed.
"""

import re
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path

from sparsekv.cli.common.commands import BY_RANKS, COMMANDS
from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.hints import command as shown
from sparsekv.formats.suggestions import nearest

NUMBERS = {"number": "a number, such as 0.05", "integer": "a whole number"}
NO_NUMBER = re.compile(r"Invalid value for '(--[a-z-]+)': Input should be a valid (number|integer)")
QUESTION_FIRST = ("generate", "trace")
"""Commands whose argument is a question."""
EXTRA, NO_OPTION = "Got unexpected extra argument", "No such option:"
UNKNOWN = re.compile(rf"{NO_OPTION} (--?[^ ]+)")
OPTION_NAME = re.compile(r"--?[a-zA-Z][\w-]*")


def described_usage(message: str, command: str, arguments: Sequence[str], *, options: Sequence[str] = ()) -> str:
    """Typer's message with a remedy.

    Args:
        command: the command that was called, or empty.
        arguments: of the whole call.
        options: the names of those that the command has.
    """
    message = message.replace("Value error, ", "").rstrip(".")
    if command == "eval" and message.startswith((f"{NO_OPTION} --index", f"{NO_OPTION} -i")):
        return f"eval takes the text of an index, and builds indices of its own: {_eval_of(arguments)}"
    if message.startswith(f"{NO_OPTION} --gpus"):
        if command not in BY_RANKS:
            return f"{command} runs as one process; several GPUs are for {' and '.join(BY_RANKS)}"
        return f"--gpus stands before the command: {shown('--gpus', _number(arguments), command)} ..."
    if command in COMMANDS and (text := _text_with_dash(message, arguments)) is not None:
        return f"a text that begins with a dash is taken for an option; put -- before it: {shown(command, '--', text)}"
    unknown = UNKNOWN.match(message)
    if unknown and (called := _command_after(unknown[1], arguments)):
        return f"give {unknown[1]} after the command: {shown(called, unknown[1])} ..."
    if unknown and command == "build-index" and _near(unknown[1], [*options, "--budget"])[-1:] == ["--budget"]:
        asked = shown("generate", "--budget", "5%")
        return f"a budget is given where an index is asked, not where it is built: {asked} ..."
    if wrong := NO_NUMBER.match(message):
        return f"{wrong[1]}{_value_of(wrong[1], arguments)}: give {NUMBERS[wrong[2]]}"
    named = next((one for one in arguments if one.rstrip("/").endswith(".skv")), None)
    if message.startswith(EXTRA) and named is not None and "--index" not in arguments and "-i" not in arguments:
        return f"{message}; an index is named by an option: --index {named}"
    if message.startswith(EXTRA) and command in QUESTION_FIRST:
        return f"{message}; put a question of several words in quotes"
    if unknown:
        meant = _meant(unknown[1], options)
        message = f"{NO_OPTION} {unknown[1]}{meant}"
        if command in QUESTION_FIRST and not meant:
            message += "; before a question that begins with a dash put --"
    page = [command] if command in COMMANDS and "'--gpus'" not in message else []  # it is no option of a command
    return f"{message}; {shown(*page, '--help')} says what there is"


def _number(arguments: Sequence[str]) -> str:
    """What stands behind `--gpus`; 2 for nothing."""
    given = " ".join(arguments).replace("--gpus=", "--gpus ").split(" ")
    return next((one for before, one in pairwise(given) if before == "--gpus" and one.isdigit()), "2")


def _command_after(option: str, arguments: Sequence[str]) -> str | None:
    """The command that an option stands before, which it should stand after; None if it does not."""
    first = next((number for number, one in enumerate(arguments) if one.partition("=")[0] == option), len(arguments))
    if any(one in COMMANDS for one in arguments[:first]):
        return None
    after = [number for number, one in enumerate(arguments) if number > first and one in COMMANDS]
    if not after:
        return None
    # What follows an option may be its value.
    likely = next((number for number in after if not arguments[number - 1].startswith("-")), after[0])
    return arguments[likely]


def known_options(error: BaseException) -> list[str]:
    """The long names of the options of the command that an error of typer's is about; none where it is not known."""
    parameters = getattr(getattr(getattr(error, "ctx", None), "command", None), "params", [])
    shown_in_help = (one for one in parameters if not getattr(one, "hidden", False))
    return [name for one in shown_in_help for name in (*one.opts, *one.secondary_opts) if name.startswith("--")]


def _text_with_dash(message: str, arguments: Sequence[str]) -> str | None:
    """The argument that was taken for an unknown option and has no option's name, such as `- And why?`."""
    named = message.removeprefix(f"{NO_OPTION} ")
    before = takewhile(lambda one: one != "--", arguments)
    dashed = [one for one in before if one.startswith("-") and not OPTION_NAME.fullmatch(one.partition("=")[0])]
    # Of one with a single dash typer names the first letter alone.
    found = (one for one in dashed if named.startswith(one if one.startswith("--") else one[:2]))
    return None if named == message else next(found, None)


def _meant(given: str, options: Sequence[str]) -> str:
    """` (did you mean --NAME?)`, with all options that are near; empty where none is."""
    near = _near(given, options)
    named = ", ".join(near[:-1]) + " or " * (len(near) > 1) + "".join(near[-1:])
    return f" (did you mean {named}?)" if near else ""


def _near(given: str, options: Sequence[str]) -> list[str]:
    """The options that begin so, or else the one that is most alike; typer names far ones too."""
    begin = [name for name in options if given.strip("-") and name.startswith(given)]
    if begin or not given.startswith("--"):
        return begin
    # Without the dashes, by which all options are alike.
    near = nearest(given[2:], [name[2:] for name in options])
    return [] if near is None else [f"--{near}"]


def _value_of(option: str, arguments: Sequence[str]) -> str:
    """A blank and what an option was last given; nothing where it was not given by its whole name."""
    given = [part for one in arguments for part in (one.split("=", 1) if one.startswith(f"{option}=") else [one])]
    values = [value for name, value in pairwise(given) if name == option]
    return f" {values[-1]}" if values else ""


def _eval_of(arguments: Sequence[str]) -> str:
    """The call of `eval` with the text of the index that it names."""
    given = [part for one in arguments[list(arguments).index("eval") + 1 :] for part in one.split("=", 1)]
    at = next((number for number, one in enumerate(given) if one in ("--index", "-i")), len(given))
    folder, others = Path(*given[at + 1 : at + 2]), [*given[:at], *given[at + 2 :]]
    try:
        # Here, because it imports a model's library: other errors do not wait for it.
        from sparsekv.formats.documents.document_hints import eval_hint
        from sparsekv.formats.manifest import read_manifest

        return eval_hint(folder, read_manifest(folder), *others)
    except SparsekvError:
        return shown("eval", "--help")
