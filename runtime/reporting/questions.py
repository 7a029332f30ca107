"""Runs the user's own questions through the model, for their queries to be measured on."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.runtime.decoding.generate import answer_room, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.reporting.queries import MeasuredQueries, QueryBlock


def question_queries(
    index: OpenIndex, questions: Iterable[str], *, special_tokens: bool = False, last: bool = False
) -> MeasuredQueries:
    """The queries of questions, which are prefilled with dense attention one after another; without any, the tail's.

    Raises:
        UsageError: a question is longer than the model has positions for.

    Args:
        last: of each question the last query alone, without the rows of its own tokens: queries that are all in one
            block and can share what they select.
    """
    recorder = _QuestionRecorder(index, last)
    for question in questions:
        recorder.record(question_ids(index, question, special_tokens=special_tokens))
    blocks = {layer: [_joined(each)] if last else each for layer, each in recorder.blocks.items()}
    return MeasuredQueries(index.artifact, blocks or None)


def _joined(each: list[QueryBlock]) -> QueryBlock:
    queries, visible = torch.cat([one.queries for one in each], 1), torch.cat([one.visible for one in each])
    return replace(each[0], queries=queries, visible=visible)


@dataclass
class _QuestionRecorder:
    """Runs questions with dense attention and records each layer's queries and new keys and values; or of each question
    its last query alone."""

    index: OpenIndex
    last: bool = False
    blocks: dict[int, list[QueryBlock]] = field(default_factory=dict)

    def record(self, question: torch.Tensor) -> None:
        answer_room(self.index, len(self.index.input_ids) + len(question))
        cache = self.index.dense_cache()

        def attention(call: AttentionCall) -> torch.Tensor:
            visible = self.index.split.tail + torch.arange(len(question)) + 1
            sinks = None if call.sink_logits is None else call.sink_logits.detach().cpu()
            block = QueryBlock(call.query.cpu(), call.keys.cpu(), call.values.cpu(), visible, sinks)
            if self.last:
                nothing = block.keys[:, :0], block.values[:, :0]
                # As many as it would see, for its position, though the rows of its own are left out.
                block = QueryBlock(block.queries[:, -1:], *nothing, visible[-1:], sinks)
            self.blocks.setdefault(call.layer, []).append(block)
            return cache.attend(call)

        with torch.inference_mode(), route_attention(self.index.model, attention):
            self.index.model(
                input_ids=question[None].to(self.index.model.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
