"""Questions and commands at a terminal, one after another; what fails is one line, and the chat goes on."""

import sys

import sparsekv.cli.chatting.commands
import sparsekv.cli.chatting.trace  # noqa: F401  # registers it, as the one before does
from sparsekv.cli.chatting.history import History
from sparsekv.cli.chatting.lines import Lines
from sparsekv.cli.chatting.session import Session
from sparsekv.cli.chatting.slash import as_question, completions, is_command, run_command
from sparsekv.cli.common.console import note
from sparsekv.cli.common.failures import describe
from sparsekv.formats.errors import SparsekvError

BARE = {"exit": "/quit", "quit": "/quit", "help": "/help"}
"""What leaves other chats, or explains them, without a stroke."""
HOW = "Ctrl-D or /quit leaves, /help lists commands"


def converse(session: Session) -> None:
    """Ask what is typed until the person leaves."""
    lines, interrupts = Lines(History(), completions), session.interrupts
    with interrupts.handled():
        while not session.left:
            try:
                entry = lines.read()
                interrupts.reset()
                _answer(session, entry)
            except EOFError:
                note("", quiet=False)
                session.left = True
            except KeyboardInterrupt:
                note("", quiet=False)
                note(HOW, quiet=bool(lines.typed()))
            except SparsekvError as error:
                note(f"error: {error}", quiet=False)


def _answer(session: Session, entry: str) -> None:
    """Do what an entry says. A failure is told in one line, or raised where --debug asks for its traceback."""
    entry = BARE.get(entry.strip(), entry)
    try:
        if is_command(entry):
            run_command(session, entry)
        elif entry.strip():
            session.ask(as_question(entry))
    except (Exception, KeyboardInterrupt) as error:
        if session.interrupts.came:
            note("interrupted; the talk is as it was before", quiet=False)
        elif "--debug" in sys.argv and not isinstance(error, SparsekvError):
            raise
        else:
            note(f"error: {describe(error, 'chat')}", quiet=False)
