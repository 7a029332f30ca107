"""Questions over one open index with one setting: independent ones, or a conversation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from sparsekv.formats.documents.continuation import border_behind
from sparsekv.formats.documents.prompt import next_turn
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import Border, ChatFrame, Prompt
from sparsekv.kernels.common.given_rows import with_cache
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.attention.config import DecodeConfig, QuestionPrefill
from sparsekv.runtime.attention.executors import GatherMaker
from sparsekv.runtime.attention.sparse_layer import appends
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.batch import Batch, why_alone
from sparsekv.runtime.decoding.generate import (
    Answer,
    Sampling,
    answer_after,
    answer_room,
    ending_tokens,
    finish_reason,
    framed_ids,
    generate,
    question_ids,
)
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.threads import all_cores, exclusive, free_cores


@dataclass(frozen=True)
class Session:
    """An open index, a config and its cache, which holds the document's keys and values."""

    index: OpenIndex
    config: DecodeConfig
    cache: IndexCache

    @classmethod
    def open(
        cls,
        index: OpenIndex,
        config: DecodeConfig,
        gather_makers: Callable[[int], GatherMaker] | None = None,
    ) -> "Session":
        """Make the cache of a config; arguments, memory and errors are those of `OpenIndex.cache`."""
        with exclusive(index.model):
            return cls(index, config, index.cache(config, gather_makers=gather_makers))

    def ask(
        self,
        question: str | torch.Tensor,
        sampling: Sampling | None = None,
        on_text: Callable[[str], None] = lambda text: None,
        stop: Callable[[], bool] | None = None,
    ) -> Answer:
        """Answer one question, greedily by default; raises what `question_ids` and `generate` raise.

        Threads that ask the same model wait for each other, whichever of its askers they ask.

        Args:
            question: text, for the index's chat template, or token ids [Q] as `question_ids` gives them.
            on_text, stop: as of `generate`.
        """
        with exclusive(self.index.model):
            return generate(self.index, self.cache, self._ids(question), sampling or Sampling(), on_text, stop)

    def ask_all(
        self, questions: Sequence[str | torch.Tensor], sampling: Sampling | None = None, *, together: int = 16
    ) -> list[Answer]:
        """Answer questions, so many `together`, in their order; raises what `ask` raises.

        Raises:
            UsageError: this config's questions cannot share a step, or `questions` is a text.
        """
        if isinstance(questions, str):
            raise UsageError("questions is a text; give a list of them, or ask it alone")
        if together < 1:
            raise UsageError(f"{together} questions together: give at least 1")
        with exclusive(self.index.model):
            if reason := why_alone(self.index, self.config.attention, self.cache):
                raise UsageError(f"{reason}; ask one question at a time")
            ids = [self._ids(one) for one in questions]
            found = dict(Batch(self.index, self.cache, sampling or Sampling(), together).answers(ids))
        return [found[number] for number in range(len(ids))]

    def _ids(self, question: str | torch.Tensor) -> torch.Tensor:
        """A question's token ids [Q]; UsageError if the model lacks one."""
        if isinstance(question, str):
            return question_ids(self.index, question)
        if not self.index.knows(question):
            raise UsageError("the question has token ids that the model does not have; make them with question_ids")
        return question


@dataclass(frozen=True)
class Turn:
    """A question's token ids [Q], with what the chat frame puts around it, and its answer's.

    `closed`: the frame of the next question has the end of this turn, in place of the answer's last token.
    """

    question: torch.Tensor
    answer: list[int]
    closed: bool = False

    @property
    def said(self) -> torch.Tensor:
        """Token ids [A] of the answer that stay in the conversation."""
        return torch.tensor(self.answer[:-1] if self.closed else self.answer, dtype=torch.int64)

    @property
    def tokens(self) -> torch.Tensor:
        """Token ids [Q + A] of both."""
        return torch.cat([self.question, self.said])


@dataclass(frozen=True)
class Place:
    """Where the next question stands: in which frame, None for none, and behind which text, None for an unknown one."""

    chat: ChatFrame | None
    border: Border | None

    @classmethod
    def behind(cls, prompt: Prompt) -> "Place":
        """That of a question behind the stored prompt."""
        return cls(prompt.chat, prompt.border)


class Conversation:
    """Questions that follow one another over an open index.

    `turns` are those that were answered, `place` is that of the next question, and `config` how it is answered.
    Allocates the config's cache; errors are those of `OpenIndex.cache`.

    Args:
        raw: questions have no chat frame around them.
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
        """Token ids [N] that the question of a turn follows: the stored prompt's, and those of the turns before it."""
        return torch.cat([self.index.input_ids, *(one.tokens for one in self.turns[:turn])])

    def last_asked(self) -> torch.Tensor:
        """Token ids [T] of what was said after the stored prompt, up to the last question, which is their end."""
        return torch.cat([self.before(len(self.turns) - 1)[len(self.index.input_ids) :], self.turns[-1].question])

    def ask(
        self,
        question: str,
        sampling: Sampling,
        on_text: Callable[[str], None] = lambda text: None,
        stop: Callable[[], bool] | None = None,
    ) -> Answer:
        """Answer the next question; question and answer become a turn of the talk.

        After any failure, an interruption included, the talk is as it was before the question. Threads that ask wait
        for each other: their questions follow one another in the order in which they get their turn. Raises what
        `question_ids` and `generate` raise.
        """
        with exclusive(self.index.model):
            chat, border = None if self.raw else self.place.chat, self.place.border
            ids = framed_ids(self.index, question, chat, border, special_tokens=self.special_tokens)
            before = self.before(len(self.turns))
            self._check_room(len(before) + len(ids))
            cache = self._cache()
            try:
                answer = answer_after(self.index, cache, before, ids, sampling, on_text, stop)
            except BaseException:
                self._asker = None  # some layers may have rows that others lack
                raise
            self._add(Turn(ids, answer.ids))
            return answer

    def forget(self) -> None:
        """Drop all turns; the document stays. After an interruption the talk is as it was before."""
        with exclusive(self.index.model):
            asker, self._asker = self._asker, None  # some layers may be rewound and others not
            if asker is not None:
                asker.cache.rewind()
            self.turns, self.place, self._asker = [], Place.behind(self.index.artifact.manifest.prompt), asker

    def switch(self, config: DecodeConfig) -> None:
        """Answer by another config from now on, over the same turns, which are prefilled again.

        The old cache is freed first, so that there are never two. After a failure the old config stays.

        Raises what making a talk with the config raises.
        """
        with exclusive(self.index.model):
            before, self.config, self._asker = self.config, config, None
            try:
                self._cache()
            except BaseException:
                self.config = before
                raise

    def _cache(self) -> IndexCache:
        """The config's cache over the document and all turns; made if there is none."""
        if self._asker is None:
            asker, prefill = Session.open(self.index, self.config), self.config.question
            if isinstance(prefill, QuestionPrefill) and appends(asker.cache.stored_layers):
                raise UsageError(
                    f"--stream: tokens that it moves into the index would be lost to --prefill {prefill.name} of "
                    "the next question; leave one of them out"
                )
            for turn in self.turns:
                self._feed(asker.cache, turn.question)
                if len(turn.said):
                    self._feed(asker.cache, turn.said)
            self._asker = asker
        return self._asker.cache

    @torch.inference_mode()
    def _feed(self, cache: IndexCache, ids: torch.Tensor) -> None:
        """Prefill token ids [T], which attend as a question's do: each piece selects for itself."""
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
            raise UsageError(f"{error}; or forget the {spoken} tokens of the talk so far") from None

    def _add(self, turn: Turn) -> None:
        turn, self.place = add_turn(self.index, self.place, turn, raw=self.raw)
        self.turns.append(turn)


def add_turn(index: OpenIndex, place: Place, turn: Turn, *, raw: bool) -> tuple[Turn, Place]:
    """A turn as the next question sees it, and the place of that question.

    Args:
        place: that of the turn's own question.
        raw: questions have no chat frame around them.
    """
    chat = None if raw or place.chat is None else next_turn(index.tokenizer, place.chat)
    if chat is not None and finish_reason(turn.answer, ending_tokens(index)) == "stop":
        turn = replace(turn, closed=True)
    border = None if place.border is None else border_behind(index.tokenizer, turn.said.tolist())
    return turn, Place(place.chat if chat is None else chat, border)
