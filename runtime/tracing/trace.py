"""Answers a question and records what each token of the answer attended to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sparsekv.formats.documents.plain_text import encode_text
from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.attention.executors import GatherMaker
from sparsekv.runtime.attention.sparse_layer import appends
from sparsekv.runtime.decoding.asker import Asker
from sparsekv.runtime.decoding.generate import Answer, Sampling
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.tracing.hiding import HidingExecutor
from sparsekv.runtime.tracing.passages import Passages, split_passages
from sparsekv.runtime.tracing.token_texts import token_texts
from sparsekv.runtime.tracing.tracer import Tracer
from sparsekv.runtime.tracing.without import log_probability, tokens_of

VERSION = 1
EVERYTHING = Form("oracle", "", Oracle())
"""Dense attention as a method, at a budget of everything."""


@dataclass
class TracedIndex:
    """An open index that answers greedily by a config, and traces its answers; `passages`: the prompt's."""

    index: OpenIndex
    config: DecodeConfig
    passages: Passages = field(init=False)

    def __post_init__(self) -> None:
        self.passages = split_passages(token_texts(self.index.tokenizer, self.index.input_ids.tolist()))

    def trace(
        self,
        question: torch.Tensor,
        max_new_tokens: int,
        on_text: Callable[[str], None] = lambda text: None,
        *,
        truth: bool = False,
    ) -> tuple[Answer, dict[str, Any]]:
        """An answer, and the trace of it as a JSON object, but for the question's text.

        Args:
            question: [Q] token ids, as `question_ids` gives them.
            on_text: called with each piece of the answer's text as it is decoded.
            truth: compare each step with dense attention of its own queries.

        Raises:
            UsageError: the config moves tokens of the answer into the index; and what `Asker.ask` raises.
        """
        tracer = Tracer(self.index, self._attending, self.passages, truth=truth)
        answer = self._asker(self._attending, tracer.gather_maker).ask(question, Sampling(max_new_tokens), on_text)
        return answer, {**self._about(answer), "truth": truth, **tracer.shares()}

    @property
    def _attending(self) -> DecodeConfig:
        """The config as selectors carry it out, whose choice is recorded, of dense attention too."""
        return self._everything if isinstance(self.config.attention, Dense) else self.config

    @property
    def _everything(self) -> DecodeConfig:
        return DecodeConfig(EVERYTHING, question=self.config.question)

    def hide(self, passages: Sequence[str]) -> torch.Tensor:
        """[N] bool: the tokens of some passages of the prompt; raises what `tokens_of` raises.

        A passage may end in the document's last characters, whose tokens are those of the question.
        """
        tokenizer, border = self.index.tokenizer, self.index.artifact.manifest.prompt.border

        def as_stored(passage: str) -> str:
            return "".join(token_texts(tokenizer, encode_text(tokenizer, passage).ids))

        texts = [*self.passages.texts, "" if border is None else border.held]
        return tokens_of(passages, texts, as_stored)[:-1]

    def without(
        self, hidden: torch.Tensor, question: torch.Tensor, max_new_tokens: int, first: Answer, *, truth: bool = False
    ) -> dict[str, Any]:
        """The answer to a question where some tokens get no attention, and the log-probability that a first answer has
        with them and without them; with `truth` the same with dense attention.

        Args:
            hidden: [N] bool, those tokens.
        """
        again = self._asker(self._attending, self._hiding(hidden))
        answer = again.ask(question, Sampling(max_new_tokens))
        found = {
            "answer": answer.text,
            "log_probability": self._log_probabilities(self._attending, hidden, question, first),
        }
        if truth:
            found["dense_log_probability"] = self._log_probabilities(self._everything, hidden, question, first)
        return found

    def _log_probabilities(
        self, config: DecodeConfig, hidden: torch.Tensor, question: torch.Tensor, first: Answer
    ) -> list[float]:
        caches = (self._asker(config, self._hiding(some)).cache for some in (torch.zeros_like(hidden), hidden))
        at_once = config.attention is EVERYTHING
        return [log_probability(self.index, cache, question, first.ids, at_once=at_once) for cache in caches]

    def _hiding(self, hidden: torch.Tensor) -> Callable[[int], GatherMaker]:
        return lambda layer: partial(HidingExecutor, hidden=hidden, sinks=self.index.split.sinks)

    def _asker(self, config: DecodeConfig, gather_makers: Callable[[int], GatherMaker]) -> Asker:
        asker = Asker.open(self.index, config, gather_makers)
        if appends(asker.cache.stored_layers):
            raise UsageError("--stream: a trace tells of the document's own tokens; leave it out")
        return asker

    def _about(self, answer: Answer) -> dict[str, Any]:
        """What was asked, and of which tokens the prompt and the answer are made."""
        manifest = self.index.artifact.manifest
        heads = self.index.artifact.context_rows(manifest.indexed_layers[0]).shape[0]
        return {
            "version": VERSION,
            "index": str(self.index.artifact.folder),
            "model": manifest.model.id,
            "method": self.config.attention.name,
            "budget": self.config.budget.value,
            "residual": self.config.attention.residual,
            "answer": answer.text,
            "n_context": manifest.split.tokens,
            "n_sinks": manifest.split.sinks,
            "n_middle": manifest.split.middle,
            "n_tail": manifest.split.tail,
            "passages": [{"start": start, "tokens": list(texts)} for start, texts in self.passages],
            "answer_tokens": token_texts(self.index.tokenizer, answer.ids),
            "layers": list(manifest.indexed_layers),
            "kv_heads": heads,
        }
