"""An open chat: its talk, how its answers are sampled and shown, and what its commands change."""

from dataclasses import dataclass, field

from sparsekv.cli.chatting.choices import Choices
from sparsekv.cli.chatting.interrupts import Interrupts
from sparsekv.cli.common.answer_stream import AnswerStream
from sparsekv.cli.common.console import note
from sparsekv.cli.common.stats import note_cut, print_stats
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.decoding.generate import Sampling
from sparsekv.runtime.decoding.talk import Talk


@dataclass
class Session:
    """What questions and commands of a chat act on.

    stats: print times after each answer. dtype: as it was asked for. left: the chat is to end.
    asked: the last question.
    """

    talk: Talk
    choices: Choices
    sampling: Sampling
    stats: bool
    quiet: bool
    dtype: str
    interrupts: Interrupts = field(default_factory=Interrupts)
    left: bool = False
    asked: str = ""

    def ask(self, question: str) -> None:
        """Print the answer to the next question as it comes; raises what `Talk.ask` raises."""
        stream, answered = AnswerStream(), False
        try:
            with self.interrupts.answering() as stop:
                answer = self.talk.ask(question, self.sampling, stream.add, stop)
                answered = True
        finally:
            if answered or stream.begun:
                stream.end()
        self.asked = question
        if self.interrupts.came:
            note("stopped; what came of the answer stays in the talk", quiet=self.quiet)
        note_cut(answer, self.sampling.max_new_tokens, quiet=self.quiet)
        if self.stats:
            print_stats(answer)

    def switch(self, config: DecodeConfig, more: str = "") -> None:
        """Answer by another config from now on, and say so, and more; raises what `Talk.switch` raises."""
        self.talk.switch(config)
        note(f"{describe(config)}{more}", quiet=self.quiet)


def describe(config: DecodeConfig) -> str:
    """Method and budget of a config in a few words."""
    if isinstance(config.attention, Dense):
        return "dense attention to all of the document"
    residual = ", with --residual" if config.attention.residual else ""
    budget = config.budget.value
    share = f"{budget:,} tokens" if isinstance(budget, int) else str(config.budget)
    return f"{config.attention.title} at {share} of the document{residual}"
