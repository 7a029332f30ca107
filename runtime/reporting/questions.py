"""Run the user's questions through the model and record their queries. A report measures methods on these queries."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from sparsekv.kernels.common.given_rows import tokens_at, with_cache
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.runtime.decoding.answer import answer_room, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.threads import exclusive
from sparsekv.runtime.reporting.recall import MeasuredQueries, QueryBlock


def question_queries(
    index: OpenIndex, questions: Iterable[str], *, special_tokens: bool = False, last: bool = False
) -> MeasuredQueries:
    """Record the queries of questions. Each question is prefilled alone after the document, with dense attention.

    Without questions, return the held-out queries of the document's tail.

    Args:
        last: record only one query of each question, and return all of them in one block, so that they can share a
            selection. The query is that of the last token before the tokens with which all questions end, such as the
            end of a chat template. Keys and values of the questions' tokens are left out.

    Raises:
        UsageError: the model has too few positions for a question. Also raises the errors of `question_ids`.
    """
    with exclusive(index.model):
        asked = [question_ids(index, question, special_tokens=special_tokens) for question in questions]
        recorder = _QuestionRecorder(index, _same_end(asked) if last else None)
        for question in asked:
            recorder.record(question)
    blocks = {layer: [_joined(each)] if last else each for layer, each in recorder.blocks.items()}
    return MeasuredQueries(index.artifact, blocks or None, apart=last and bool(blocks))


def _same_end(questions: Sequence[torch.Tensor]) -> int:
    """Return the number of equal tokens at the end of all questions, at most the shortest question's length - 1.

    Returns 0 for fewer than two questions.
    """
    shortest = min((len(one) for one in questions), default=1)
    if len(questions) < 2:
        return 0
    ends = torch.stack([one[len(one) - shortest :] for one in questions]).flip(1)
    return min(int((ends == ends[0]).all(0).cumprod(0).sum()), shortest - 1)


def _joined(each: list[QueryBlock]) -> QueryBlock:
    queries, visible = torch.cat([one.queries for one in each], 1), torch.cat([one.visible for one in each])
    return replace(each[0], queries=queries, visible=visible)


@dataclass
class _QuestionRecorder:
    """Runs questions with dense attention and records the queries and the new keys and values of each layer.

    If `tokens_after` is set, only the query with this many tokens after it is recorded.
    """

    index: OpenIndex
    tokens_after: int | None = None
    blocks: dict[int, list[QueryBlock]] = field(default_factory=dict)

    def record(self, question: torch.Tensor) -> None:
        answer_room(self.index, len(self.index.input_ids) + len(question))
        cache = self.index.dense_cache()

        def attention(call: AttentionCall) -> torch.Tensor:
            visible = self.index.split.tail + torch.arange(len(question)) + 1
            sinks = None if call.sink_logits is None else call.sink_logits.detach().cpu()
            block = QueryBlock(call.query.cpu(), call.keys.cpu(), call.values.cpu(), visible, sinks)
            if self.tokens_after is not None:
                at = len(question) - 1 - self.tokens_after
                nothing = block.keys[:, :0], block.values[:, :0]
                # `visible` still counts the question's own tokens, because the query's position follows from it.
                block = QueryBlock(block.queries[:, at : at + 1], *nothing, visible[at : at + 1], sinks)
            self.blocks.setdefault(call.layer, []).append(block)
            return cache.attend(call)

        with torch.inference_mode(), route_attention(self.index.model, attention):
            self.index.model(
                **tokens_at(self.index.model, question, self.index.split.tokens),
                **with_cache(self.index.model, cache),
                logits_to_keep=1,
            )
