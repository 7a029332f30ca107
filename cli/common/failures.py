"""Report errors as one line on stderr with a remedy, and exit with a code. Errors are exceptions, and command lines
that typer refuses."""

import errno
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NoReturn

from sparsekv.cli.common.commands import BY_RANKS, COMMANDS, moved
from sparsekv.cli.common.streams import flush_streams, printable
from sparsekv.formats.distributed.process import own_place
from sparsekv.formats.errors import SparsekvError, any_of, nearest
from sparsekv.formats.errors import command as shown

NUMBERS = {"number": "a number, such as 0.05", "integer": "a whole number"}
NO_NUMBER = re.compile(r"Invalid value for '(--[a-z-]+)': Input should be a valid (number|integer)")
QUESTION_FIRST = ("generate", "trace")
"""Commands whose argument is a question."""
INDEX_FIRST = ("serve", "start", "convert", "build-index")
"""Commands whose arguments are indices, or may be."""
EXTRA, NO_OPTION = "Got unexpected extra argument", "No such option:"
UNKNOWN = re.compile(rf"{NO_OPTION} (--?[^ ]+)")
OPTION_NAME = re.compile(r"--?[a-zA-Z][\w-]*")


def described_usage(
    message: str, command: str, arguments: Sequence[str], *, options: Sequence[str] = (), takes_text: bool = True
) -> str:
    """Return the error message for a command line that typer refuses.

    For a known mistake, the message explains the mistake, with the right command line where this can be derived.
    Otherwise typer's message is returned, mostly followed by similar options or by the command for help.

    Args:
        message: typer's message.
        command: the command that was called; empty if none was.
        arguments: all arguments of the call.
        options: names of the command's options.
        takes_text: the command has an argument, such as a question or a file.
    """
    message = message.replace("Value error, ", "").rstrip(".")
    if command == "eval" and message.startswith((f"{NO_OPTION} --index", f"{NO_OPTION} -i")):
        return f"eval takes the text of an index, and builds indices of its own: {_eval_of(arguments)}"
    unknown = UNKNOWN.match(message)
    if unknown and (now := moved(command, unknown[1].lstrip("-"))) is not None:
        renamed = [one for one in arguments if one != "--end-to-end"]
        renamed[renamed.index(command)] = now
        return f"a whole model's steps are timed by a command of their own: {shown(*renamed)}"
    if unknown and unknown[1] in ("--index", "-i") and command in INDEX_FIRST:
        return f"{command} takes an index as an argument: {shown(*_without_option(unknown[1], arguments))}"
    if message.startswith(f"{NO_OPTION} --gpus"):
        if command not in BY_RANKS:
            return f"{command} runs as one process; several GPUs are for {' and '.join(BY_RANKS)}"
        return f"--gpus stands before the command: {shown('--gpus', _number(arguments), command)} ..."
    if command in COMMANDS and (text := _text_with_dash(message, arguments)) is not None:
        if not takes_text:
            return (
                f"{command} takes no text, such as {shlex.quote(text)}; {shown(command, '--help')} says what there is"
            )
        return f"a text that begins with a dash is taken for an option; put -- before it: {shown(command, '--', text)}"
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
    page = [command] if command in COMMANDS and "'--gpus'" not in message else []  # --gpus belongs to sparsekv
    return f"{message}; {shown(*page, '--help')} says what there is"


def _without_option(option: str, arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the values of an option, but without its name."""
    return [one.removeprefix(f"{option}=") for one in arguments if one != option]


def _number(arguments: Sequence[str]) -> str:
    """Return the value of `--gpus`, or 2 if it has none."""
    given = " ".join(arguments).replace("--gpus=", "--gpus ").split(" ")
    return next((one for before, one in pairwise(given) if before == "--gpus" and one.isdigit()), "2")


def _command_after(option: str, arguments: Sequence[str]) -> str | None:
    """Return the command that follows a misplaced option, which belongs after the command.

    None if the option already follows a command, or if no command follows the option.
    """
    first = next((number for number, one in enumerate(arguments) if one.partition("=")[0] == option), len(arguments))
    if any(one in COMMANDS for one in arguments[:first]):
        return None
    after = [number for number, one in enumerate(arguments) if number > first and one in COMMANDS]
    if not after:
        return None
    # A word right after an option may be the option's value, not the command.
    likely = next((number for number in after if not arguments[number - 1].startswith("-")), after[0])
    return arguments[likely]


def known_options(error: BaseException) -> list[str]:
    """Return the long names of the visible options of the command that a typer error is about. Empty if the command
    is unknown."""
    shown_in_help = (one for one in _parameters(error) if not getattr(one, "hidden", False))
    return [name for one in shown_in_help for name in (*one.opts, *one.secondary_opts) if name.startswith("--")]


def has_argument(error: BaseException) -> bool:
    """Whether the command that a typer error is about has an argument that is not an option."""
    return any(one.param_type_name == "argument" for one in _parameters(error))


def _parameters(error: BaseException) -> Sequence[Any]:
    return getattr(getattr(getattr(error, "ctx", None), "command", None), "params", [])


def _text_with_dash(message: str, arguments: Sequence[str]) -> str | None:
    """Return the argument that typer took for an unknown option but that is plain text, such as `- And why?`. None
    if there is no such argument."""
    named = message.removeprefix(f"{NO_OPTION} ")
    before = takewhile(lambda one: one != "--", arguments)
    dashed = [one for one in before if one.startswith("-") and not OPTION_NAME.fullmatch(one.partition("=")[0])]
    # For an argument with a single dash, typer's message contains only the first letter.
    found = (one for one in dashed if named.startswith(one if one.startswith("--") else one[:2]))
    return None if named == message else next(found, None)


def _meant(given: str, options: Sequence[str]) -> str:
    """Return ` (did you mean --NAME?)` with all similar options; empty if no option is similar."""
    near = _near(given, options)
    return f" (did you mean {any_of(near)}?)" if near else ""


def _near(given: str, options: Sequence[str]) -> list[str]:
    """Return the options that begin with `given`, or else the most similar long option; empty if none is similar.

    An option is also similar if `given` is one or several of its words, as `tokens` is of `max-new-tokens`.

    Typer's own suggestions are not used, because they may be options that are not similar.
    """
    begin = [name for name in options if given.strip("-") and name.startswith(given)]
    if begin or not given.startswith("--"):
        return begin
    # Compare names without the dashes, which would make all options look similar.
    near = nearest(given[2:], [name[2:] for name in options], parts=False)
    if near is not None:
        return [f"--{near}"]
    return [name for name in options if f"-{given[2:]}-" in f"{name[1:]}-"]


def _value_of(option: str, arguments: Sequence[str]) -> str:
    """Return a blank and the last value given for an option; empty if the option was not given by its whole name."""
    given = [part for one in arguments for part in (one.split("=", 1) if one.startswith(f"{option}=") else [one])]
    values = [value for name, value in pairwise(given) if name == option]
    return f" {values[-1]}" if values else ""


def _eval_of(arguments: Sequence[str]) -> str:
    """Return an `eval` command line with the text of the index that `--index` names.

    If the index cannot be read, return the command line for the help of `eval`.
    """
    given = [part for one in arguments[list(arguments).index("eval") + 1 :] for part in one.split("=", 1)]
    at = next((number for number, one in enumerate(given) if one in ("--index", "-i")), len(given))
    folder, others = Path(*given[at + 1 : at + 2]), [*given[:at], *given[at + 2 :]]
    try:
        # Imported here, because `manifest` imports torch, which takes seconds and which other errors do not need.
        from sparsekv.formats.documents.document_hints import eval_hint
        from sparsekv.formats.index.manifest import read_manifest

        return eval_hint(folder, read_manifest(folder), *others)
    except SparsekvError:
        return shown("eval", "--help")


LESS_MEMORY = {
    "build-index": "give fewer --max-tokens, a smaller --chunk-size or --dtype bfloat16",
    "append": "append less at a time, or give a smaller --chunk-size",
    "generate": "give --placement disk, or ask a shorter question",
    "chat": "give --placement disk, ask a shorter question, or /forget the talk so far",
    "serve": "give --placement disk, fewer indices or fewer --slots",
    "recall-report": "give fewer --method or --budget at a time",
    "tune": "give fewer --method at a time",
    "trace": "leave out --truth, or ask a shorter question",
    "eval": "give a smaller --length or --chunk-size",
    "bench": "give a smaller --context or --batch",
    "bench-model": "give a smaller --context, --batch or --distinct-layers",
}
"""Advice on how to use less memory, by command."""
REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EFBIG: "allow larger files there",
    errno.EACCES: "give yourself permission there",
    errno.EPERM: "give yourself permission there",
    errno.EROFS: "choose a folder that can be written",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "close other programs",
    errno.EISDIR: "move the folder that lies there away",
    errno.ENOTDIR: "move the file that lies there away",
    errno.EIO: "check the disk",
}
"""Remedies for an OSError, by its errno."""
_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "unable to allocate",
    "bad_alloc",
    "failed to map segment",
    "out of memory",
)
_NO_THREAD = "can't start new thread"
_DEVICE = ("CUDA error", "CUDA out of memory", "cuBLAS", "CUBLAS_STATUS", "cuDNN", "CUDNN_STATUS", "CUDA driver")


def describe(error: BaseException, command: str) -> str:
    """Return one line about an error: what failed, and what to do.

    Args:
        command: name of the command that failed; empty if none was called.
    """
    less = LESS_MEMORY.get(command, "close other programs")
    if isinstance(error, SparsekvError) and not _blames_another(error):
        return str(error)
    if any(_is_device(one) for one in causes(error)):
        return _device(error, less)
    if any(_is_memory(one) for one in causes(error)):
        return f"there is not enough memory on this machine; {less}, or raise the limit (ulimit -v) if there is one"
    if isinstance(error, RecursionError):
        return "something that was read is nested too deeply to be understood; check the files that you gave"
    if any(isinstance(one, RuntimeError) and _NO_THREAD in str(one) for one in causes(error)):
        return "the system starts no more threads; close other programs, or raise the limits (ulimit -u and ulimit -v)"
    if isinstance(error, OSError) and (error.errno is not None or error.filename is not None):
        return _system(error)
    text = " ".join(str(error).split())
    if isinstance(error, RuntimeError) and "home directory" in text:
        return "a path begins with ~ and a user who has no folder here; write the whole path"
    if isinstance(error, RuntimeError) and "faiss" in text:
        return f"faiss, which makes clusters, failed: {text}; try another --seed or fewer clusters, or report it"
    if isinstance(error, ImportError):
        return f"a part of the installation cannot be loaded: {text}; install sparsekv again"
    place = own_place()
    ranks = [] if place is None or place.folder is None else ["--gpus", str(place.size)]
    given = [argument for argument in sys.argv[1:] if argument != "--debug"]
    again = shlex.join(["sparsekv", *ranks, "--debug", *given])
    return f"internal error: {type(error).__name__}: {text}; run it again as `{again}` to see where, and report it"


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its chain of causes, including those suppressed by `from None`."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


def _blames_another(error: SparsekvError) -> bool:
    """Whether a lack of memory or threads caused an error whose message names another reason.

    Such a message may name a file that cannot be read, for example.
    """
    below = list(causes(error))[1:]
    return "memory of" not in str(error) and any(_is_memory(one) or _NO_THREAD in str(one) for one in below)


def _is_memory(error: BaseException) -> bool:
    text = str(error).lower()
    named = isinstance(error, RuntimeError | OSError | ImportError | SystemError) and any(
        part in text for part in _MEMORY
    )
    return isinstance(error, MemoryError) or named or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _is_device(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    named = (getattr(torch, name, None) for name in ("OutOfMemoryError", "AcceleratorError"))
    kinds = tuple(kind for kind in named if isinstance(kind, type))  # older versions of torch have no AcceleratorError
    told = isinstance(error, RuntimeError) and any(part in str(error) for part in _DEVICE)
    return told or isinstance(error, kinds)


def _device(error: BaseException, less: str) -> str:
    text = str(next(one for one in causes(error) if _is_device(one)))
    if "out of memory" in text.lower() or "ALLOC_FAILED" in text:
        return f"there is not enough memory on the GPU; {less}, end what else runs there, or use --device cpu"
    first = " ".join(text.split("\n")[0].split())
    return f"the GPU failed: {first}; run it again, and with --device cpu if it fails again"


def _system(error: OSError) -> str:
    reason = (error.strerror or " ".join(str(error).split()) or type(error).__name__).lower()
    remedy = REMEDIES.get(error.errno or 0, "check it, and run the same command again")
    thing = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{thing or 'the system'}: {reason}; {remedy}"


def fail(error: BaseException, command: str, *, debug: bool) -> NoReturn:
    """Print an error as one line on stderr and exit. With `debug`, print its traceback first."""
    if debug:
        with suppress(OSError):
            print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    for one in causes(error):
        one.__traceback__ = None  # frees the objects of the traceback's frames: memory may have run out
    usage = getattr(error, "format_message", None)  # typer's usage errors have this method; typer may not be imported
    message = (
        describe(error, command)
        if usage is None
        else described_usage(
            usage(), command, sys.argv[1:], options=known_options(error), takes_text=has_argument(error)
        )
    )
    notes = getattr(error, "__notes__", [])
    message += f" ({'; '.join(notes)})" if notes else ""
    end(int(getattr(error, "exit_code", 1)), f"error: {message}")


def end(code: int, message: str = "") -> NoReturn:
    """Print a message to stderr and exit. A message that cannot be written, as to a full disk, is dropped."""
    if message:
        with suppress(OSError):
            print(f"sparsekv: {' '.join(printable(message).split())}", file=sys.stderr)
    flush_streams()
    sys.exit(code)
