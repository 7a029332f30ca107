"""The queries that a report measures on: those of the held-out tail, or of the user's own questions."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import layer_file
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.runtime.decoding.generate import question_ids
from sparsekv.runtime.decoding.open import OpenIndex


@dataclass(frozen=True)
class QueryBlock:
    """Queries [Hq, Q, D] of one layer, with keys and values [Hk, E, D] of their own tokens (E = 0 for the tail).

    `visible` [Q] is the number of tail and new tokens that each query sees; every query sees all sinks and the whole
    middle.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor
    sink_logits: torch.Tensor | None

    def part(self, queries: slice, device: torch.device) -> "QueryBlock":
        """Some of the queries, on a device."""
        sinks = None if self.sink_logits is None else self.sink_logits.to(device)
        asked, visible = self.queries[:, queries].to(device), self.visible[queries].to(device)
        return QueryBlock(asked, self.keys.to(device), self.values.to(device), visible, sinks)


def tail_block(artifact: Artifact, layer: int, *, calibration: bool = False) -> QueryBlock:
    """The tail's second half, which nothing was calibrated on; with `calibration` its first half."""
    stored, tail = artifact.queries(layer), artifact.manifest.split.tail
    keys, values = artifact.context(layer)
    first, stop = (0, tail // 2) if calibration else (tail // 2, tail)
    return QueryBlock(
        queries=stored["tail"][:, first:stop],
        keys=keys[:, :0],
        values=values[:, :0],
        visible=torch.arange(first, stop) + 1,
        sink_logits=stored.get("sink_logits"),
    )


def seen_block(artifact: Artifact, layer: int) -> QueryBlock | None:
    """The last document queries that indexers were given, as many as a report measures on, treated as if they followed
    the middle. None if the index keeps none."""
    name = layer_file("samples", layer)
    if name not in artifact.manifest.files:
        return None
    keys, values = artifact.context(layer)
    queries = artifact.tensors(name)["queries"][:, -(artifact.manifest.split.tail // 2) :]
    return QueryBlock(
        queries=queries,
        keys=keys[:, :0],
        values=values[:, :0],
        visible=torch.zeros(queries.shape[1], dtype=torch.int64),
        sink_logits=artifact.queries(layer).get("sink_logits"),
    )


@dataclass
class _QuestionRecorder:
    """Runs questions with dense attention and records each layer's queries and new keys and values; or of each question
    its last query alone."""

    index: OpenIndex
    last: bool = False
    blocks: dict[int, list[QueryBlock]] = field(default_factory=dict)

    def record(self, question: torch.Tensor) -> None:
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


class MeasuredQueries:
    """The queries of a report: of `questions` if there are any, else of the tail. `blocks(layer)` are one layer's.

    Args:
        last: of each question the last query alone, without the rows of its own tokens: queries that are all in one
            block and can share what they select.
    """

    def __init__(
        self,
        artifact: Artifact,
        index: OpenIndex | None = None,
        questions: list[str] | None = None,
        *,
        special_tokens: bool = False,
        last: bool = False,
    ):
        self.artifact, self._recorder = artifact, None
        if index is not None and questions:
            self._recorder = _QuestionRecorder(index, last)
            for question in questions:
                self._recorder.record(question_ids(index, question, special_tokens=special_tokens))

    def blocks(self, layer: int) -> Iterator[QueryBlock]:
        if self._recorder is None:
            yield tail_block(self.artifact, layer)
        elif not self._recorder.last:
            yield from self._recorder.blocks[layer]
        else:
            each = self._recorder.blocks[layer]
            joined = torch.cat([one.queries for one in each], 1), torch.cat([one.visible for one in each])
            yield replace(each[0], queries=joined[0], visible=joined[1])

    def __len__(self) -> int:
        return sum(block.queries.shape[1] for block in self.blocks(self.artifact.manifest.indexed_layers[0]))
