"""vLLM's attention on CPUs, with sparse decode steps of requests over indices in the same batch as other requests."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.vllm.decoding import AnswerLayers, DecodeSteps, SparseAttention, attend


@dataclass
class SparseCPUMetadata(CPUAttentionMetadata):
    """vLLM's metadata of a step. `build` makes the metadata again for other sequence lengths [B].

    `split` is the step's division into sparse and dense requests, which the step's first layer makes for all layers.
    """

    build: Callable[[torch.Tensor], CPUAttentionMetadata] | None = None
    split: "Split | None" = None


@dataclass(frozen=True)
class Split:
    """The sparse and the dense requests of a step.

    Attributes:
        sparse: the layers of each token that attends sparsely, by the token's index in the batch.
        rest: metadata for vLLM's own attention of all other tokens; None if there are none or no token is sparse. vLLM
            also attends for the sparse tokens, each to a single row, and this output is overwritten.
    """

    sparse: dict[int, AnswerLayers]
    rest: CPUAttentionMetadata | None


class SparseCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Makes vLLM's metadata, and stores in it the function that makes it again for other sequence lengths."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SparseCPUMetadata:
        build = super().build

        def with_lengths(lengths: torch.Tensor) -> CPUAttentionMetadata:
            return build(common_prefix_len, common_attn_metadata.replace(seq_lens=lengths), fast_build)

        return SparseCPUMetadata(**vars(with_lengths(common_attn_metadata.seq_lens)), build=with_lengths)


class SparseCPUImpl(SparseAttention, CPUAttentionBackendImpl):
    """vLLM's attention of one layer, with sparse decode steps if the connector has set `steps`."""

    def call(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> AttentionCall:
        return AttentionCall(
            layer=self.number,
            query=query[:, None],
            keys=keys[:, None],
            values=values[:, None],
            softmax_scale=self.scale,
            softcap=self.logits_soft_cap or None,
            window=None if self.sliding_window == -1 else self.sliding_window,
            sink_logits=self.sinks,
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *scales: Any,
        **others: Any,
    ) -> Any:
        split = None if self.steps is None or attn_metadata is None else _split(attn_metadata, self.steps)
        if split is None or not split.sparse or self.sliding_window != -1:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **others)
        if split.rest is not None:
            super().forward(layer, query, key, value, kv_cache, split.rest, output, *scales, **others)
        for token, layers in split.sparse.items():
            output[token] = attend(layers, self.call(query[token], key[token], value[token]))[:, 0]
        return output


class SparseCPUBackend(CPUAttentionBackend):
    """The backend that `plugin.register` names."""

    @staticmethod
    def get_impl_cls() -> type[SparseCPUImpl]:
        return SparseCPUImpl

    @staticmethod
    def get_builder_cls() -> type[SparseCPUMetadataBuilder]:
        return SparseCPUMetadataBuilder


def _split(metadata: SparseCPUMetadata, steps: DecodeSteps) -> Split:
    """Divide a step's requests. A sparse request is recognised by the slot that its only token writes."""
    if metadata.split is None:
        assert metadata.build is not None
        starts, sparse, lengths = metadata.query_start_loc.tolist(), {}, metadata.seq_lens.clone()
        slots = metadata.slot_mapping.tolist()
        for request, (start, stop) in enumerate(pairwise(starts)):
            if stop - start == 1 and (layers := steps.at(slots[start])) is not None:
                sparse[start], lengths[request] = layers, 1
        others = sparse and len(sparse) < metadata.num_actual_tokens
        metadata.split = Split(sparse, metadata.build(lengths) if others else None)
    return metadata.split
