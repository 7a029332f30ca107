"""An open chat: its conversation, sampling and output, how Ctrl-C interrupts it, and its slash commands."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from rapidfuzz import process
from rapidfuzz.distance import DamerauLevenshtein

from sparsekv.cli.answering.options import Choices
from sparsekv.cli.answering.session import refuse_unsavable, save_session
from sparsekv.cli.common.console import note
from sparsekv.cli.common.method_options import note_budgets
from sparsekv.cli.common.questions import AnswerStream
from sparsekv.cli.common.stats import note_cut, print_sources, print_stats
from sparsekv.cli.pages.trace import describe_size, refuse_unwritable, write
from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.choose_config import idle_budget
from sparsekv.runtime.decoding.session import Conversation
from sparsekv.runtime.selection.interface import DENSE
from sparsekv.runtime.selection.registry import choose_methods
from sparsekv.runtime.tracing.trace import TracedIndex


class Interrupts:
    """Handles Ctrl-C in a chat.

    The first Ctrl-C during an answer that has begun ends the answer after its next token, so that the cache stays
    consistent. Otherwise KeyboardInterrupt is raised. `came`: whether Ctrl-C was pressed since `reset`, even if a
    library lost the KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.came = self._answering = self._begun = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle Ctrl-C by this object within the context.

        If SIGINT was ignored before, as in a background job of a shell script, it stays ignored.
        """
        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_IGN:
            yield
            return
        signal.signal(signal.SIGINT, self._take)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def reset(self) -> None:
        """Prepare for the next question or command."""
        self.came = False

    @contextmanager
    def answering(self) -> Iterator[Callable[[], bool]]:
        """Yield a function to call after each token of an answer. It returns whether to stop."""
        self._answering, self._begun = True, False
        try:
            yield self._stop
        finally:
            self._answering = False

    def _stop(self) -> bool:
        self._begun = True
        return self.came

    def _take(self, number: int, frame: FrameType | None) -> None:
        first, self.came = not self.came, True
        if not (first and self._answering and self._begun):
            raise KeyboardInterrupt


@dataclass
class Chat:
    """State of a chat. Questions and commands change the state.

    Attributes:
        talk: the conversation, with the config that answers the next question.
        choices: settings that /method keeps.
        interrupts: handles Ctrl-C during a question or a command.
        stats: whether times are printed after each answer.
        dtype: the value of --dtype.
        sources: maximum number of sources that are printed after each answer.
        left: whether the user has asked to end the chat.
        asked: the last question; empty before the first.
        told: the last note about how the chat template shows earlier answers; empty before the first such note.
    """

    talk: Conversation
    choices: Choices
    sampling: Sampling
    stats: bool
    quiet: bool
    dtype: str
    sources: int = 0
    interrupts: Interrupts = field(default_factory=Interrupts)
    left: bool = False
    asked: str = ""
    told: str = ""

    def ask(self, question: str) -> None:
        """Print the answer to the next question while it is generated. Raises the errors of `Conversation.ask`."""
        if (lost := self.talk.lost_of_answer()) not in ("", self.told):
            note(lost, quiet=self.quiet)
            self.told = lost
        stream, answered = AnswerStream(), False
        try:
            with self.interrupts.answering() as stop:
                answer = self.talk.ask(question, self.sampling, stream.add, stop, sources=self.sources)
                self.asked, answered = question, True
        finally:
            if answered or stream.begun:
                stream.end()
        if self.interrupts.came:
            note("stopped; the part of the answer so far stays in the talk", quiet=self.quiet)
        note_cut(answer, self.sampling.max_new_tokens, quiet=self.quiet)
        if self.sources:
            print_sources(answer)
        if self.stats:
            print_stats(answer)

    def switch(self, config: DecodeConfig, hint: str = "") -> None:
        """Answer by another config from now on, and print a note of the config followed by a hint.

        Raises the errors of `Conversation.switch`.
        """
        self.talk.switch(config)
        note(f"{describe(config)}{hint}", quiet=self.quiet)


def describe(config: DecodeConfig) -> str:
    """Return a few words about a config: its method and budget, or dense attention."""
    if isinstance(config.attention, Dense):
        return "dense attention to all of the document"
    attention, budget = config.attention, config.budget.value
    share = f"{budget:,} tokens" if isinstance(budget, int) else str(config.budget)
    fixed = attention.method.ignores_budget
    told = "with the same tokens for any budget" if fixed else f"at {share} of the document"
    return f"{attention.title} {told}{', with --residual' if attention.residual else ''}"


ALIKE = 0.5
"""Minimum similarity, from 0 to 1, at which a command is suggested for an unknown name."""


@dataclass(frozen=True)
class Slash:
    """A slash command: its name, its argument, its help text, and the function that runs it."""

    name: str
    argument: str
    help: str
    run: Callable[[Chat, str], None]

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()


COMMANDS: dict[str, Slash] = {}
"""All slash commands by name, in the order of /help."""


def slash(usage: str, told: str) -> Callable[[Callable[[Chat, str], None]], Callable[[Chat, str], None]]:
    """Return a decorator that registers a slash command. The decorated function takes the chat and the command's
    argument.

    Args:
        usage: the command and its argument, such as `/budget B`.
        told: the help text in /help.
    """
    name, _, argument = usage.removeprefix("/").partition(" ")

    def register(run: Callable[[Chat, str], None]) -> Callable[[Chat, str], None]:
        COMMANDS[name] = Slash(name, argument, told, run)
        return run

    return register


def is_command(entry: str) -> bool:
    """Whether an entry is a command, which begins with a single slash.

    Pasted text of several lines is never a command. An entry that begins with // is a question that begins with /.
    """
    return entry.startswith("/") and not entry.startswith("//") and "\n" not in entry


def as_question(entry: str) -> str:
    """Return the question that an entry asks. A single line that begins with // loses its first slash.

    The entry must not be a command.
    """
    return entry[1:] if entry.startswith("//") and "\n" not in entry else entry


def run_command(session: Chat, entry: str) -> None:
    """Run a slash command as it was typed.

    Raises:
        UsageError: there is no such command, or it takes no argument. The command itself may raise other errors.
    """
    name, _, argument = entry.removeprefix("/").partition(" ")
    if name not in COMMANDS:
        alike = DamerauLevenshtein.normalized_similarity
        nearest = process.extractOne(name, list(COMMANDS), scorer=alike, score_cutoff=ALIKE)
        meant = "/help lists them" if nearest is None else f"did you mean /{nearest[0]}?"
        raise UsageError(
            f"no command /{name}: {meant} (to ask a question that begins with /, type a second / before it)"
        )
    argument = argument.strip()
    if argument and not COMMANDS[name].argument:
        raise UsageError(f"/{name} {argument}: /{name} takes no argument; type it alone")
    COMMANDS[name].run(session, argument)


def completions(line: str) -> list[str]:
    """Return the commands that begin with `line`."""
    return [f"/{name}" for name in COMMANDS if line.startswith("/") and f"/{name}".startswith(line)]


KEYS = {
    "// ...": "a question that begins with /",
    "!multi": "begin a question of several lines; !end ends it (pasted lines are one question)",
    "Ctrl-C": "stop an answer, or drop what is typed",
    "Ctrl-D": "leave",
}


@slash("/help", "list these commands")
def show_help(session: Chat, argument: str) -> None:
    told = {one.usage: one.help for one in COMMANDS.values()} | KEYS
    width = max(map(len, told)) + 2
    for usage, meaning in told.items():
        note(f"{usage:<{width}}{meaning}", quiet=False)


@slash("/save NAME.skv", "save the document and the whole talk as a new index")
def save(session: Chat, argument: str) -> None:
    talk = session.talk
    if not argument:
        raise UsageError("/save: give the new index a name, such as /save talk.skv")
    if not talk.turns:
        raise UsageError("/save: nothing was asked yet, and the document is saved already; ask first")
    folder = Path(os.path.expanduser(argument))
    refuse_unsavable(talk.index.artifact, folder, session.dtype, "/save")
    encoding = {"raw": talk.raw, "special_tokens": talk.special_tokens}
    save_session(talk.index, folder, talk.turns, talk.config, **encoding, quiet=session.quiet)


@slash("/method NAME", "answer with another method, at its own budget or that of /budget; without NAME: list methods")
def method(session: Chat, argument: str) -> None:
    if argument:
        config = session.choices.other_method(session.talk.config, argument)
        own = ", its own budget" if session.choices.budget is None else ""
        fixed = isinstance(config.attention, Dense) or config.attention.method.ignores_budget
        session.switch(config, "" if fixed else f"{own}; /budget B changes that")
        return
    usable = choose_methods([], list(session.choices.artifact.manifest.methods))
    note(f"{describe(session.talk.config)}; there are: {', '.join([*usable, DENSE])}", quiet=False)


@slash("/budget B", "attend to another share (5%, 0.05) or number of the document's tokens")
def budget(session: Chat, argument: str) -> None:
    if argument:
        session.switch(session.choices.other_budget(session.talk.config, argument))
        session.choices.budget = session.talk.config.budget
        note_budgets([session.talk.config.budget], session.talk.index.split.middle, quiet=session.quiet)
        if told := idle_budget(session.talk.config.attention, f"/budget {argument}"):
            note(told, quiet=session.quiet)
    else:
        note(describe(session.talk.config), quiet=False)


@slash("/stats [on|off]", "after each answer, print times and the share of keys and values read; again: print no more")
def stats(session: Chat, argument: str) -> None:
    if argument not in ("", "on", "off"):
        raise UsageError(f"/stats {argument}: write /stats, /stats on or /stats off")
    session.stats = argument == "on" if argument else not session.stats
    note(f"stats are {'on' if session.stats else 'off'}", quiet=session.quiet)


@slash("/forget", "forget the conversation so far, and keep the document")
def forget(session: Chat, argument: str) -> None:
    turns = len(session.talk.turns)
    session.talk.forget()
    note(f"forgot {turns} question{'' if turns == 1 else 's'}", quiet=session.quiet)


@slash("/quit", "leave")
def leave(session: Chat, argument: str) -> None:
    session.left = True


@slash("/trace FILE.html", "ask the last question again, and write a page of what its answer attends to")
def trace(session: Chat, argument: str) -> None:
    """Ask the last question again over a second cache of the document, and write the trace as `trace --truth` does.

    The trace includes the conversation before the question.

    Raises:
        UsageError: the page has no name, nothing was asked yet, or the errors of `refuse_unwritable`.
    """
    talk = session.talk
    if not argument:
        raise UsageError("/trace: give the page a name, such as /trace out.html")
    if not talk.turns:
        raise UsageError("/trace: nothing was asked yet; ask first")
    output = Path(os.path.expanduser(argument))
    refuse_unwritable(output, "/trace")
    traced = TracedIndex(talk.index, replace(talk.config, placement="device"))
    answer, document = traced.trace(talk.last_asked(), len(talk.turns[-1].answer), truth=True)
    size = write({**document, "question": session.asked}, output)
    if answer.ids != talk.turns[-1].answer:
        note("asked again, the question got another answer", quiet=session.quiet)
    note(f"{output}: {describe_size(document, size)}", quiet=session.quiet)
