"""Two indices of one tiny model, questions with the answers that a session gives, and checks of streams."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.indexing.build import build_index
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.decoding.answer import Answer, Sampling
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.serving.scheduler import Scheduler
from sparsekv.runtime.serving.stream import Piece, Stream, Submission

from .configs import sparse
from .small_index import TEXT, random_ids, reopen, small_plan
from .tiny_models import tiny_tokenizer

ALL = sparse("squeezed", Squeezed(), Budget(1.0), question=Dense())
"""Config by which a method selects everything; a question's tokens may be divided among steps."""
OWN = sparse("squeezed", Squeezed(), Budget(1.0))
"""Config by which a method selects everything; a question's tokens select together."""
LENGTHS = (5, 17, 150, 2, 64, 560)
LONGEST = 8


def two_indices(folder: Path) -> dict[str, OpenIndex]:
    """Build the indices a and b of one model over two texts, and open them."""
    plan = small_plan()
    plans = {
        "a": plan,
        "b": replace(plan, prompt=encode_prompt(tiny_tokenizer(), TEXT[5000:], max_tokens=200)),
    }
    for name, one in plans.items():
        build_index(one, folder / f"{name}.skv")
    return {name: reopen(one, folder / f"{name}.skv") for name, one in plans.items()}


@dataclass
class Served:
    """Open indices by name, and the answers to questions that are asked alone."""

    indices: dict[str, OpenIndex]
    answers: list[tuple[tuple[object, ...], Answer]] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)

    def alone(self, name: str, question: torch.Tensor, longest: int = LONGEST, config: DecodeConfig = ALL) -> Answer:
        """Return the answer that a session gives; it is computed once."""
        key = name, question.tolist(), longest, config
        for other, answer in self.answers:
            if other == key:
                return answer
        self.answers.append((key, self._session(name, config).ask(question, Sampling(longest))))
        return self.answers[-1][1]

    def _session(self, name: str, config: DecodeConfig) -> Session:
        index = self.indices[name]
        for session in self.sessions:
            if session.index is index and session.config == config:
                return session
        self.sessions.append(Session.open(index, config))
        return self.sessions[-1]

    def ask(
        self,
        scheduler: Scheduler,
        name: str,
        question: torch.Tensor,
        longest: int = LONGEST,
        config: DecodeConfig = ALL,
        **others: object,
    ) -> Stream:
        return scheduler.submit(Submission(name, config, question, Sampling(longest), **others))  # type: ignore[arg-type]


def question(number: int) -> torch.Tensor:
    """Return question `number`, with one of LENGTHS; the longest does not fit in one step."""
    return random_ids(LENGTHS[number % len(LENGTHS)], seed=number)


def ids(pieces: Iterable[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


def text(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def check(pieces: list[Piece], answer: Answer) -> None:
    """Fail unless the pieces are those of the whole answer."""
    assert ids(pieces) == answer.ids
    assert text(pieces) == answer.text
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish == answer.finish_reason
    usage = pieces[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.answer_tokens) == (answer.prompt_tokens, answer.generated_tokens)
