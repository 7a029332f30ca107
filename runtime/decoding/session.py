"""Ask questions over one open index with one config, independently or as a conversation."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from sparsekv.formats.documents.continuation import border_behind
from sparsekv.formats.documents.prompt import lost_of_answer, next_turn
from sparsekv.formats.errors import UsageError, check_type
from sparsekv.formats.index.schema import Border, ChatFrame, Prompt
from sparsekv.kernels.common.given_rows import with_cache
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.attention.config import DecodeConfig, Dense, QuestionPrefill
from sparsekv.runtime.attention.executors import GatherMaker
from sparsekv.runtime.attention.sparse_layer import appends
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.answer import (
    Answer,
    Sampling,
    answer_room,
    answer_text,
    ending_tokens,
    finish_reason,
    framed_ids,
    question_ids,
)
from sparsekv.runtime.decoding.engine import Engine, Request, answer_after, generate, pack, why_alone
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.threads import all_cores, exclusive, free_cores

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def chosen_sampling(sampling: object) -> Sampling:
    """Return `sampling`, or greedy sampling for None. Raises UsageError for an object of another type."""
    if sampling is None:
        return Sampling()
    if not isinstance(sampling, Sampling):
        raise UsageError(f"sampling is {sampling!r}: give sparsekv.Sampling(max_new_tokens=...)")
    return sampling


@dataclass(frozen=True, repr=False, eq=False)
class Session:
    """An open index, a decode config, and a cache for the config with the document's keys and values."""

    index: OpenIndex
    config: DecodeConfig
    cache: IndexCache

    def __repr__(self) -> str:
        artifact, attention = self.index.artifact, self.config.attention
        method = attention.name if isinstance(attention, Dense) else f"{attention.title} at {self.config.budget}"
        return f"Session({str(artifact.folder)!r}, {artifact.manifest.model.id}, {method})"

    @classmethod
    def open(
        cls,
        index: OpenIndex,
        config: DecodeConfig,
        gather_makers: Callable[[int], GatherMaker] | None = None,
    ) -> Self:
        """Make a session with a new cache; arguments, memory use and errors are those of `OpenIndex.cache`."""
        with exclusive(index.model):
            return cls(index, config, index.cache(config, gather_makers=gather_makers))

    def ask(
        self,
        question: str | torch.Tensor,
        sampling: Sampling | None = None,
        on_text: Callable[[str], None] | None = None,
        stop: Callable[[], bool] | None = None,
        *,
        sources: int = 0,
    ) -> Answer:
        """Answer one question, greedily by default.

        Threads that use the same model wait for each other, even if each has its own session. Raises the errors of
        `question_ids` and of `generate`, and UsageError for a question or a sampling of another type.

        Args:
            question: a text, which `question_ids` encodes, or integer token ids [Q].
            on_text, stop, sources: as in `Request`.
        """
        with exclusive(self.index.model):
            ids = self._ids(question)
            return generate(self.index, self.cache, ids, chosen_sampling(sampling), on_text, stop, sources)

    def ask_all(
        self,
        questions: Sequence[str | torch.Tensor],
        sampling: Sampling | None = None,
        *,
        together: int = 16,
        sources: int = 0,
    ) -> list[Answer]:
        """Answer questions in batches; return the answers in the order of the questions. Raises the errors of `ask`.

        Args:
            together: the maximum number of questions that decode at the same time.
            sources: as in `Request`.

        Raises:
            UsageError: questions cannot share a step with this config, `questions` is not a sequence of questions, or
                `together` is not an integer of at least 1.
        """
        if isinstance(questions, str | torch.Tensor) or not isinstance(questions, Iterable):
            raise UsageError(f"questions is a {type(questions).__name__}: give a list of texts, or use ask")
        check_type("together", together, int)
        if together < 1:
            raise UsageError(f"together is {together}: give at least 1")
        with exclusive(self.index.model):
            if reason := why_alone(self.index, self.config.attention, self.cache):
                raise UsageError(f"{reason}; ask one question at a time")
            chosen = chosen_sampling(sampling)
            ids = [self._ids(one, f"questions[{number}]") for number, one in enumerate(questions)]
            requests = [Request(one, chosen, sources=sources) for one in ids]
            slots = min(together, max(1, len(requests)))
            found = dict(Engine(self.index, pack(self.cache, slots)).answers(requests))
        return [found[number] for number in range(len(requests))]

    def _ids(self, question: str | torch.Tensor, name: str = "question") -> torch.Tensor:
        """Return a question's token ids [Q], int64, as a copy, which the caller cannot change during the answer.

        Raises the errors of `question_ids`.

        Args:
            name: the name of the argument `question` in errors.

        Raises:
            UsageError: the question is neither a text nor a tensor [Q] of at least one integer, or the model does not
                have one of the ids.
        """
        if isinstance(question, str):
            return question_ids(self.index, question)
        if not isinstance(question, torch.Tensor):
            raise UsageError(f"{name} is a {type(question).__name__}: give a text, or a tensor of its token ids")
        if question.dim() != 1 or not len(question) or question.dtype not in INTEGERS:
            raise UsageError(
                f"{name} is a tensor {list(question.shape)} of {question.dtype}: give token ids, a tensor of one "
                "dimension with at least one integer"
            )
        ids = question.to("cpu", torch.int64, copy=True)
        if not self.index.knows(ids):
            raise UsageError(f"{name} has token ids that the model does not have; make them with its tokenizer")
        return ids


@dataclass(frozen=True)
class Turn:
    """The token ids of a question [Q], chat frame included, and of its answer.

    With `closed`, the chat frame of the next question begins with the end-of-turn token. Therefore the answer's last
    token, which ended the answer, is left out of the conversation.
    """

    question: torch.Tensor
    answer: list[int]
    closed: bool = False

    @property
    def said(self) -> torch.Tensor:
        """The answer's token ids [A] that stay in the conversation."""
        return torch.tensor(self.answer[:-1] if self.closed else self.answer, dtype=torch.int64)

    @property
    def tokens(self) -> torch.Tensor:
        """Token ids [Q + A] of the question and of the answer."""
        return torch.cat([self.question, self.said])


@dataclass(frozen=True)
class Place:
    """Context of the next question: its chat frame `chat`, and `border`, the end of the text before the question.

    `chat` is None if the question has no chat frame. `border` is None if the text before the question is unknown.
    """

    chat: ChatFrame | None
    border: Border | None

    @classmethod
    def behind(cls, prompt: Prompt) -> "Place":
        """Return the place of a first question, which directly follows the stored prompt."""
        return cls(prompt.chat, prompt.border)


class Conversation:
    """A conversation over an open index: each question follows the earlier questions and answers.

    `turns` are the answered questions. `place` and `config` are the place and the decode config of the next question.
    Allocates the config's cache. Raises the errors of `OpenIndex.cache`, and UsageError if the method appends tokens to
    its index and another method selects for questions.

    Args:
        raw: encode questions without a chat frame.
        special_tokens: special tokens in questions keep their meaning.
    """

    def __init__(
        self,
        index: OpenIndex,
        config: DecodeConfig,
        *,
        raw: bool = False,
        special_tokens: bool = False,
    ):
        self.index, self.config = index, config
        self.raw, self.special_tokens = raw, special_tokens
        self.turns: list[Turn] = []
        self.place = Place.behind(index.artifact.manifest.prompt)
        self._asker: Session | None = None
        with exclusive(index.model):
            self._cache()

    def before(self, turn: int) -> torch.Tensor:
        """Return the token ids [N] before the question of a turn: the stored prompt and the earlier turns."""
        return torch.cat([self.index.input_ids, *(one.tokens for one in self.turns[:turn])])

    def last_asked(self) -> torch.Tensor:
        """Return the token ids [T] after the stored prompt, up to and including the question of the last turn."""
        return torch.cat([self.before(len(self.turns) - 1)[len(self.index.input_ids) :], self.turns[-1].question])

    def ask(
        self,
        question: str,
        sampling: Sampling,
        on_text: Callable[[str], None] | None = None,
        stop: Callable[[], bool] | None = None,
        *,
        sources: int = 0,
    ) -> Answer:
        """Answer the next question; question and answer become a turn of the conversation.

        A failure or an interruption leaves the conversation as it was before the question. Threads that call this
        method wait for each other. Their questions become turns in the order in which the threads acquire the model.
        Raises the errors of `question_ids`, of `answer_after` and of the constructor.
        """
        with exclusive(self.index.model):
            chat, border = None if self.raw else self.place.chat, self.place.border
            ids = framed_ids(self.index, question, chat, border, special_tokens=self.special_tokens)
            before = self.before(len(self.turns))
            self._check_room(len(before) + len(ids))
            cache = self._cache()
            try:
                answer = answer_after(self.index, cache, before, Request(ids, sampling, on_text, stop, sources=sources))
            except BaseException:
                self._asker = None  # after an interruption, this cache's layers may have different numbers of rows
                raise
            self._add(Turn(ids, answer.ids))
            return answer

    def warm_up(self) -> None:
        """Run a decode step over the stored prompt, before the first question; see `Engine.warm_up`."""
        with exclusive(self.index.model):
            try:
                Engine(self.index, self._cache()).warm_up()
            except BaseException:
                self._asker = None  # layers may have different numbers of rows
                raise

    def lost_of_answer(self) -> str:
        """Return a line about the last answer if the chat template shows it only in part, or allows one question only.

        The line is empty otherwise, before the first answer, and without a chat frame.
        """
        if not self.turns or self.raw or self.place.chat is None:
            return ""
        return lost_of_answer(self.index.tokenizer, answer_text(self.index, self.turns[-1].answer))

    def forget(self) -> None:
        """Drop all turns; the document stays. An interruption leaves the conversation as it was before."""
        with exclusive(self.index.model):
            asker, self._asker = self._asker, None  # an interruption of `rewind` may leave only some layers rewound
            if asker is not None:
                asker.cache.rewind()
            self.turns, self.place, self._asker = [], Place.behind(self.index.artifact.manifest.prompt), asker

    def switch(self, config: DecodeConfig) -> None:
        """Use another config for the next questions; the turns stay and are prefilled again.

        The old cache is freed first, so that there are never two caches in memory. After a failure the old config
        stays. Raises the errors of the constructor for this config.
        """
        with exclusive(self.index.model):
            before, self.config, self._asker = self.config, config, None
            try:
                self._cache()
            except BaseException:
                self.config = before
                raise

    def _cache(self) -> IndexCache:
        """Return the config's cache over the document and all turns; make the cache if there is none.

        Raises the errors of the constructor.
        """
        if self._asker is None:
            asker, prefill = Session.open(self.index, self.config), self.config.question
            if isinstance(prefill, QuestionPrefill) and appends(asker.cache.stored_layers):
                raise UsageError(
                    f"--stream cannot be used with --prefill {prefill.name}: at the next question, {prefill.name} "
                    "cannot select tokens that --stream has moved into the index; leave one of the two options out"
                )
            for turn in self.turns:
                self._feed(asker.cache, turn.question)
                if len(turn.said):
                    self._feed(asker.cache, turn.said)
            self._asker = asker
        return self._asker.cache

    @torch.inference_mode()
    def _feed(self, cache: IndexCache, ids: torch.Tensor) -> None:
        """Append token ids [T] to the cache by a prefill, with the attention of a question's tokens."""
        model, known = self.index.model, cache.get_seq_length()
        positions = torch.arange(known, known + len(ids), device=model.device)[None]
        cache.expect_prompt(known + len(ids))
        with route_attention(model, cache.attend), free_cores(model), all_cores(model):
            model(
                input_ids=ids[None].to(model.device),
                position_ids=positions,
                **with_cache(model, cache),
                logits_to_keep=1,
            )

    def _check_room(self, tokens: int) -> None:
        try:
            answer_room(self.index, tokens)
        except UsageError as error:
            if not self.turns:
                raise
            spoken = len(self.before(len(self.turns))) - len(self.index.input_ids)
            raise UsageError(
                f"{error}; or forget the conversation so far, which has {spoken} of these tokens"
            ) from None

    def _add(self, turn: Turn) -> None:
        turn, self.place = add_turn(self.index, self.place, turn, raw=self.raw)
        self.turns.append(turn)


def add_turn(index: OpenIndex, place: Place, turn: Turn, *, raw: bool) -> tuple[Turn, Place]:
    """Return the turn, and the place of the next question.

    The turn is marked as `closed` if its answer ends with an EOS token and the next question has a chat frame.

    Args:
        place: the place of this turn's question.
        raw: questions have no chat frame.
    """
    chat = None if raw or place.chat is None else next_turn(index.tokenizer, place.chat)
    if chat is not None and finish_reason(turn.answer, ending_tokens(index)) == "stop":
        turn = replace(turn, closed=True)
    border = None if place.border is None else border_behind(index.tokenizer, turn.said.tolist())
    return turn, Place(place.chat if chat is None else chat, border)
