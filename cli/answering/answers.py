"""Read the questions of a call, choose the batch size, and answer the questions one after another or as a batch."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

import torch

from sparsekv.cli.answering.options import AT_ONCE, GenerateOptions
from sparsekv.cli.common.compiling import compile_or_note
from sparsekv.cli.common.console import note_plain
from sparsekv.cli.common.questions import read_lines, read_question
from sparsekv.formats.device import choose_device
from sparsekv.formats.documents.plain_text import encode_text
from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.decoding.answer import NO_ANSWER, Answer, Sampling, answer_room, question_ids
from sparsekv.runtime.decoding.engine import Engine, Request, pack, why_alone
from sparsekv.runtime.decoding.lossless import DraftingEngine
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Session, Turn

if TYPE_CHECKING:  # only ranks need torch.distributed
    from sparsekv.formats.distributed.group import Ranks


@dataclass(frozen=True)
class Questions:
    """The question of a call, or the lines of a batch file.

    Attributes:
        batch_file: name of the batch file, `-` for standard input; None for a single question.
        raw, special_tokens: how questions become token ids, as in `question_ids`.
    """

    texts: list[str]
    batch_file: str | None
    raw: bool
    special_tokens: bool

    @classmethod
    def read(cls, options: GenerateOptions, ranks: "Ranks | None") -> Self:
        """Read the questions that the options name.

        With several ranks, the first rank reads the questions and sends them to the others: only it has standard input.

        Raises:
            UsageError: both a question and a batch are given, or no question; or a file cannot be read.
        """
        texts = cls._texts(options) if ranks is None or ranks.first else []
        texts = texts if ranks is None else ranks.share(texts)
        return cls(texts, options.batch_file, **options.encoding)

    @staticmethod
    def _texts(options: GenerateOptions) -> list[str]:
        if options.batch_file is None:
            return [read_question(options.prompt, options.prompt_file)]
        if options.prompt is not None or options.prompt_file is not None:
            one = "a question" if options.prompt_file is None else "--prompt-file"
            raise UsageError(f"--batch-file and {one} exclude each other: give one of them")
        return read_lines(options.batch_file, "--batch-file")

    def together(self, at_once: int | None, device: str) -> int:
        """Return how many questions are answered at once, if the memory of the device named `device` suffices.

        Args:
            at_once: the value of --batch-size; None is auto.
        """
        asked = sum(bool(text.strip()) for text in self.texts)
        return max(1, min(asked, at_once or AT_ONCE.get(choose_device(device).type, 1)))

    def encode(self, index: OpenIndex) -> list[torch.Tensor | None]:
        """Return the token ids [Q] of each question; None for a blank line of a batch.

        Raises:
            UsageError: a question is empty or cannot be encoded, or leaves no position of the model for an answer.
            SparsekvError: the special tokens of a question cannot be encoded as plain text.
        """
        of_batch = self.batch_file is not None
        lines = enumerate(self.texts, 1)
        return [None if of_batch and not text.strip() else self._encode(index, text, line) for line, text in lines]

    def note_plain(self, index: OpenIndex, first: int, *, quiet: bool) -> None:
        """Print a note with the special tokens in the questions from index `first` on, which are read as plain text.

        Prints nothing if there are none, with `quiet`, or if special tokens keep their meaning.
        """
        if quiet or self.special_tokens:
            return
        found = Counter[str]()
        for text in self.texts[first:]:
            found.update(encode_text(index.tokenizer, text).plain)
        note_plain("the question" if self._source is None else f"the text of {self._source}", found, quiet=quiet)

    @property
    def _source(self) -> str | None:
        return "standard input" if self.batch_file == "-" else self.batch_file

    def _encode(self, index: OpenIndex, text: str, line: int) -> torch.Tensor:
        try:
            ids = question_ids(index, text, raw=self.raw, special_tokens=self.special_tokens)
            answer_room(index, len(index.input_ids) + len(ids))
        except UsageError as error:
            where = "" if self._source is None else f"{self._source} line {line}: "
            raise UsageError(f"{where}{error}") from None
        return ids


QUESTION_ROWS = 256  # assumed tokens per question, chat template included
SHARE_OF_FREE = 0.25
"""Share of a GPU's free memory that `--batch-size auto` may use for the keys and values of questions and answers. It is
small because the buffers of these keys and values double in size when they grow."""


def choose_batch_size(asked: int | None, session: Session, questions: int, answer_tokens: int) -> int:
    """Return how many questions to answer at once, if each answer has up to `answer_tokens` tokens.

    Args:
        asked: the value of --batch-size. None: as many as fit into memory, up to `AT_ONCE`, or 1 if the config or the
            model allows only one question at a time.
        questions: number of all questions, which is the maximum.

    Raises:
        UsageError: `asked` is more than 1, and the config or the model allows only one question at a time.
    """
    alone = why_alone(session.index, session.config.attention, session.cache)
    if session.config.lossless:
        alone = "--lossless verifies drafts of one question at a time"
    if asked is None:
        return 1 if alone else max(1, min(_fitting(session, answer_tokens), questions))
    if asked > 1 and alone:
        raise UsageError(f"--batch-size {asked}: {alone}; give --batch-size 1")
    return min(asked, questions)


def _fitting(session: Session, answer_tokens: int) -> int:
    device = session.index.model.device
    most = AT_ONCE.get(device.type, 1)
    if device.type != "cuda":
        return most
    rows = [one for layer in session.cache.stored_layers for one in (layer.keys, layer.values) if one is not None]
    token = sum(one.shape[0] * one.shape[2] * one.element_size() for one in rows)
    state = 2 * sum(one.nbytes for one in session.cache.live_states().values())  # a step copies its sequences' states
    free = torch.cuda.mem_get_info(device)[0]
    return min(most, int(SHARE_OF_FREE * free) // (state + 2 * token * (QUESTION_ROWS + answer_tokens)))


@dataclass(frozen=True)
class Schedule:
    """Answers questions, one after another or several at once, and yields the answers in the questions' order.

    Args:
        questions: token ids [Q] of each question; None for a blank line.
        engine: decodes the answers; its slots are the number of questions that it answers at once.
        ranks: the processes that share the model. All of them answer the same questions. None for a single process.
        sources: maximum number of sources of an answer, which are the passages that it attended to most.
    """

    sampling: Sampling
    questions: Sequence[torch.Tensor | None]
    engine: Engine
    ranks: "Ranks | None"
    sources: int = 0

    @classmethod
    def open(
        cls,
        index: OpenIndex,
        config: DecodeConfig,
        sampling: Sampling,
        questions: Sequence[torch.Tensor | None],
        size: int | None,
        ranks: "Ranks | None",
        sources: int = 0,
    ) -> Self:
        """Make a schedule that answers `size` questions at once; None means as many as fit.

        Raises:
            UsageError: `size` is more than 1, and the config or the model allows only one question at a time; or the
                config has `lossless`, together with sources or several ranks. Also raises the errors of `Session.open`
                and `DraftingEngine`.
        """
        if config.lossless and index.model.device.type == "cpu":
            # On a CPU, a pass over T drafted tokens takes as long as T steps, so drafts by the method save nothing.
            config = replace(config, attention=Dense())
        session, asked = Session.open(index, config), sum(one is not None for one in questions)
        together = choose_batch_size(size, session, asked, sampling.max_new_tokens)
        if config.lossless:
            if ranks is not None or sources:
                other = "--sources" if sources else "several processes (torchrun)"
                raise UsageError(f"--lossless cannot be used with {other}; leave one of them out")
            return cls(sampling, questions, DraftingEngine(index, session.cache, config), ranks)
        engine = Engine(index, pack(session.cache, together) if together > 1 else session.cache)
        return cls(sampling, questions, engine, ranks, sources)

    @property
    def drafts(self) -> str:
        """A line with the numbers of drafted and accepted tokens of --lossless; empty without the option."""
        return self.engine.told if isinstance(self.engine, DraftingEngine) else ""

    def compile(self, mode: str, *, quiet: bool) -> None:
        """Compile the model's layers as `--compile` says, for the number of steps that the answers may take.

        Raises the errors of `compile_or_note`.
        """
        slots, shape = self.engine.slots, self.engine.cache.step_shape
        steps = sum(one is not None for one in self.questions) * self.sampling.max_new_tokens // slots
        alone = self.ranks is None
        compile_or_note(
            mode, self.engine.index.model, self.engine.warm_up, steps, shape=shape, alone=alone, quiet=quiet
        )

    def answers(self, on_text: Callable[[str], None]) -> Iterator[Answer]:
        """Yield the answers in the order of the questions, each as soon as it and all earlier answers are finished.

        The answer to a blank line is `NO_ANSWER`.

        Args:
            on_text: called with each piece of an answer's text, if questions are answered one after another.
        """
        answers = self._in_order(on_text if self.engine.slots == 1 else None)
        if self.ranks is None:
            return answers
        from sparsekv.runtime.decoding.load import join_answer

        return map(partial(join_answer, self.ranks), answers)

    def turn(self, answer: Answer) -> Turn:
        """Return the only question and its answer as a turn of a conversation.

        Raises ValueError for several questions or a blank line.
        """
        (question,) = self.questions
        if question is None:
            raise ValueError("a blank line is no turn")
        return Turn(question, answer.ids)

    def _in_order(self, on_text: Callable[[str], None] | None) -> Iterator[Answer]:
        asked = [number for number, one in enumerate(self.questions) if one is not None]
        ready: dict[int, Answer] = {number: NO_ANSWER for number, one in enumerate(self.questions) if one is None}
        asking = (one for one in self.questions if one is not None)
        requests = [Request(one, self.sampling, on_text, sources=self.sources) for one in asking]
        answers = self.engine.answers(requests)
        for number in range(len(self.questions)):
            while number not in ready:
                place, answer = next(answers)
                ready[asked[place]] = answer
            yield ready.pop(number)
