"""What the questions of an evaluation are answered with: a model, methods at budgets, and prefills."""

from dataclasses import dataclass, field

import torch

from sparsekv.formats.documents.continuation import encode_question
from sparsekv.formats.documents.prompt import FixedPrompt, encode_prompt
from sparsekv.formats.errors import UsageError
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.models.rope import positions_after, positions_of
from sparsekv.formats.schema import ModelIdentity, TokenizerIdentity
from sparsekv.runtime.attention.config import Dense, Own, QuestionPrefill
from sparsekv.runtime.evaluation.builder import Builder
from sparsekv.runtime.evaluation.metrics import METRICS
from sparsekv.runtime.evaluation.table import Way
from sparsekv.runtime.evaluation.tasks import Context, Question
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.registry import DENSE


@dataclass(frozen=True)
class Comparison:
    """What each question is answered with: a model, and dense attention beside methods at budgets, over each prefill.

    The builder has what the methods need, and the prefills; with `residual`, each method is run once more with it;
    `keep` keeps the indices. So many questions of a context are answered `together`.
    """

    loaded: LoadedModel
    identity: tuple[ModelIdentity, TokenizerIdentity]
    methods: dict[str, Method]
    budgets: list[Budget]
    builder: Builder
    question: Dense | Own | QuestionPrefill = field(default_factory=Own)
    residual: bool = False
    raw: bool = False
    keep: bool = False
    max_new_tokens: int | None = None
    together: int = 1

    def count(self, text: str) -> int:
        """Tokens of a document as it is indexed."""
        return len(self.prompt(text, bare=False).input_ids)

    def prompt(self, text: str, *, bare: bool) -> FixedPrompt:
        """A document as it is indexed."""
        return encode_prompt(self.loaded.tokenizer, text, raw=self.raw or bare)

    def question_ids(self, context: Context, question: Question, prompt: FixedPrompt) -> torch.Tensor:
        """Token ids [Q] after the document: the question in the chat template if there is one, and its answer's
        beginning; of a continuation its first tokens."""
        tokenizer, border = self.loaded.tokenizer, prompt.border
        if METRICS[question.metric].continuation:
            return torch.tensor(
                encode_question(tokenizer, border, None, question.answers[0])[: question.max_new_tokens]
            )
        if prompt.chat is not None:
            return torch.tensor(encode_question(tokenizer, border, prompt.chat, question.text, question.prefix))
        text = f"\n{question.text} {question.prefix}".rstrip()
        parts = [question.text, question.prefix] if context.length is None else [text]
        return torch.tensor(encode_question(tokenizer, border, None, *parts))

    def longest(self, question: Question) -> int:
        """Tokens that an answer may have."""
        if METRICS[question.metric].continuation or self.max_new_tokens is None:
            return question.max_new_tokens
        return self.max_new_tokens

    def room(self, context: Context, document: int | None = None) -> int | None:
        """Tokens that a document may have, so that each of its questions and answers fits behind it; None for any.

        Args:
            document: the tokens it has, which decide where some models' positions change; None if they are not known.
        """
        config = self.loaded.model.config
        positions = positions_of(config) if document is None else positions_after(config, document)
        if positions is None:
            return None
        empty = self.prompt("", bare=context.bare)
        asked = (len(self.question_ids(context, one, empty)) + self.longest(one) for one in context.questions)
        return positions - max(asked)

    def ways(self) -> list[tuple[Way, Budget | None]]:
        """Every way in which a question is answered, dense attention first."""
        variants = ["", "residual"] if self.residual else [""]
        return [
            one
            for prefill in self.builder.prefills
            for one in [
                (Way(prefill, DENSE), None),
                *(
                    (Way(prefill, name, variant, budget), budget)
                    for name in self.methods
                    for variant in variants
                    for budget in self.budgets
                ),
            ]
        ]


def check_room(comparison: Comparison, contexts: list[Context]) -> None:
    """Raise UsageError where a document, its question and the answer are more than the model has positions."""
    for context in contexts:
        tokens = len(comparison.prompt(context.text, bare=context.bare).input_ids)
        room = comparison.room(context, tokens)
        if room is not None and tokens > room:
            raise UsageError(
                f"a document of {context.task} has {tokens} tokens, where {comparison.loaded.name} has room for {room} "
                "beside the question and the answer; give a smaller --length"
            )
