"""Answer a shell's question for completions."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress

from sparsekv.cli.common.streams import prepare_streams
from sparsekv.cli.completing.bash_line import read_bash_line
from sparsekv.cli.completing.candidates import Candidates, candidates
from sparsekv.cli.completing.known import KnownCommand, remember, remembered


def answer(arguments: list[str], learn: Callable[[], KnownCommand]) -> None:
    """Print what may come next, as `scripts.ASK` describes; nothing else is printed, and nothing is raised.

    Args:
        arguments: the shell's name, and the line (bash) or its words.
        learn: asks the commands themselves, which takes seconds.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C at a prompt is no failure to tell of
    with suppress(Exception), open(os.devnull, "w") as nothing, redirect_stderr(nothing):
        prepare_streams()
        with redirect_stdout(nothing):
            lines = _lines(arguments, program(learn))
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()


def program(learn: Callable[[], KnownCommand]) -> KnownCommand:
    """What is known of all commands; learned if it is not remembered."""
    known = remembered()
    if known is None:
        known = learn()
        remember(known)
    return known


def _lines(arguments: list[str], known: KnownCommand) -> list[str]:
    shell, *words = arguments
    if shell == "bash":
        line = read_bash_line(*words)
        found = candidates(known, line.words[1:-1], line.words[-1])
        inserted = (line.insertion(word) for word in found.words)
        return [_kind(found), *(word for word in inserted if word is not None)]
    before, found = "", candidates(known, words[:-1], words[-1])
    if shell == "zsh" and words[-1].startswith("--"):  # zsh keeps an option and its equals sign
        before = words[-1][: words[-1].find("=") + 1]
    return [_kind(found), *(f"{word.removeprefix(before)}\t{about}" for word, about in found.words.items())]


def _kind(found: Candidates) -> str:
    is_open = bool(found.words) and all(word.endswith(("/", "=")) for word in found.words)
    return found.files or ("open" if is_open else "words")
