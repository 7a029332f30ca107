"""An open chat: its conversation, sampling and output, how commands change it, and how Ctrl-C interrupts it."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from sparsekv.cli.answering.options import Choices
from sparsekv.cli.common.console import note
from sparsekv.cli.common.questions import AnswerStream
from sparsekv.cli.common.stats import note_cut, print_sources, print_stats
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.session import Conversation


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
        told: the last note about how the chat template shows earlier answers; empty before.
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

    def switch(self, config: DecodeConfig, more: str = "") -> None:
        """Answer by another config from now on, and note the config followed by `more`. Raises the
        errors of `Conversation.switch`."""
        self.talk.switch(config)
        note(f"{describe(config)}{more}", quiet=self.quiet)


def describe(config: DecodeConfig) -> str:
    """Describe the method and the budget of a config, or dense attention, in a few words."""
    if isinstance(config.attention, Dense):
        return "dense attention to all of the document"
    attention, budget = config.attention, config.budget.value
    share = f"{budget:,} tokens" if isinstance(budget, int) else str(config.budget)
    fixed = attention.method.ignores_budget
    told = "with the same tokens for any budget" if fixed else f"at {share} of the document"
    return f"{attention.title} {told}{', with --residual' if attention.residual else ''}"
