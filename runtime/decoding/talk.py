"""A talk over an open index: each question sees the document and all that was asked and answered before it.

The turns' own tokens stay in the cache behind the stored ones, as exact rows, or in clusters where a method appends
them. When the setting changes, or a failure left a cache half written, a new cache is made and the turns are prefilled
over it again; their rows are not carried over. Rows of all layers but the first depend on what the old setting
attended to, some may lie in its clusters, and a method that observes questions needs their queries. The turns are short
beside the document, so this costs little.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsekv.formats.documents.turns import next_turn
from sparsekv.formats.errors import UsageError
from sparsekv.formats.schema import ChatFrame
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.attention.question import QuestionPrefill
from sparsekv.runtime.attention.sparse_layer import appends
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.asker import Asker
from sparsekv.runtime.decoding.exclusive import exclusive
from sparsekv.runtime.decoding.few_rows_linear import all_cores
from sparsekv.runtime.decoding.free_cores import free_cores
from sparsekv.runtime.decoding.generate import (
    Answer,
    Sampling,
    answer_after,
    answer_room,
    ending_tokens,
    framed_ids,
)
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.setting import Setting


@dataclass(frozen=True)
class Turn:
    """A question's token ids [Q], with what the chat frame puts around it, and its answer's."""

    question: torch.Tensor
    answer: list[int]

    @property
    def tokens(self) -> torch.Tensor:
        """Token ids [Q + A] of both."""
        return torch.cat([self.question, torch.tensor(self.answer)])


class Talk:
    """Questions that follow one another over an open index.

    `turns` are those that were answered, `chat` is the frame of the next question, and `setting` what it is answered
    with. Allocates the setting's cache; errors are those of `OpenIndex.sparse_cache`.

    Args:
        placement: where the document's keys and values are kept.
        prefill: how a question's tokens select, if not like the answer's.
        raw: questions have no chat frame around them.
        special_tokens: special tokens in questions keep their meaning.
    """

    def __init__(
        self,
        index: OpenIndex,
        setting: Setting,
        *,
        placement: str = "device",
        prefill: QuestionPrefill | None = None,
        raw: bool = False,
        special_tokens: bool = False,
    ):
        self.index, self.setting = index, setting
        self.placement, self.prefill, self.raw, self.special_tokens = placement, prefill, raw, special_tokens
        self.turns: list[Turn] = []
        self.chat = index.artifact.manifest.prompt.chat
        self._asker: Asker | None = None
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
        for each other: their questions follow one another in the order in which they get their turn.

        Args:
            on_text: called with each piece of text as it is decoded.
            stop: asked after each token; what came until it is True is the answer.

        Raises:
            UsageError: the question is empty, no position of the model is left for an answer, or an answer's own
                callback asks.
            SparsekvError: its special tokens cannot be read as plain text, or the logits are not finite.
        """
        with exclusive(self.index.model):
            ids = framed_ids(self.index, question, None if self.raw else self.chat, special_tokens=self.special_tokens)
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
            self.turns, self.chat, self._asker = [], self.index.artifact.manifest.prompt.chat, asker

    def switch(self, setting: Setting) -> None:
        """Answer with another setting from now on, over the same turns, which are prefilled again.

        The old cache is freed first, so that there are never two. After a failure the old setting stays.

        Raises what making a talk with the setting raises.
        """
        with exclusive(self.index.model):
            before, self.setting, self._asker = self.setting, setting, None
            try:
                self._cache()
            except BaseException:
                self.setting = before
                raise

    def _cache(self) -> IndexCache:
        """The setting's cache over the document and all turns; made if there is none."""
        if self._asker is None:
            asker = Asker.open(self.index, self.setting, placement=self.placement, question=self.prefill)
            prefill = self.prefill
            if prefill is not None and prefill.method is not None and appends(asker.cache.stored_layers):
                raise UsageError(
                    f"--stream: tokens that it moves into the index would be lost to --prefill {prefill.name} of "
                    "the next question; leave one of them out"
                )
            for turn in self.turns:
                self._feed(asker.cache, turn.question)
                self._feed(asker.cache, torch.tensor(turn.answer))
            self._asker = asker
        return self._asker.cache

    @torch.inference_mode()
    def _feed(self, cache: IndexCache, ids: torch.Tensor) -> None:
        """Prefill token ids [T], which attend as a question's do: each piece selects for itself."""
        model, known = self.index.model, cache.get_seq_length()
        positions = torch.arange(known, known + len(ids), device=model.device)[None]
        with route_attention(model, cache.attend), free_cores(model), all_cores(model):
            model(
                input_ids=ids[None].to(model.device),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
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
        self.turns.append(turn)
        if not self.raw:
            self.chat = chat_after(self.index, self.chat, turn)


def chat_after(index: OpenIndex, chat: ChatFrame | None, turn: Turn) -> ChatFrame | None:
    """The frame of the question that follows a turn, whose own question had the frame `chat`; None without one."""
    if chat is None:
        return None
    # Only the end of a turn stands in the frame too: an answer that was cut off may end with text like it.
    last = turn.answer[-1:]
    ending = last if set(last) <= ending_tokens(index.model) else []
    return next_turn(index.tokenizer, chat, str(index.tokenizer.decode(ending)))
