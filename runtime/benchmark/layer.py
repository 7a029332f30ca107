"""One layer's tensors for a batch of sequences, and the decode step over them as `generate` runs it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sparsekv.formats.context_rows import context_rows
from sparsekv.formats.int8_centroids import with_centroids_in_8_bits
from sparsekv.formats.int8_rows import quantise, row_bytes
from sparsekv.formats.schema import LayerFacts, Split
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.attention.packed_layers import packed_layer
from sparsekv.runtime.attention.plan import LayerParts, plan_layer
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.dense_layer import DenseLayer
from sparsekv.runtime.cache.dense_layer_in_8_bits import DenseLayerIn8Bits
from sparsekv.runtime.cache.graphs import Step
from sparsekv.runtime.cache.kv_store import MemoryRows, MiddleRows
from sparsekv.runtime.cache.rows_in_8_bits import RowsIn8Bits, of_tokens, read_centroids
from sparsekv.runtime.cache.slots import PackedStep
from sparsekv.runtime.cache.stored_layer import StoredLayer
from sparsekv.runtime.selection.context import LayerPosition, MiddleContext
from sparsekv.runtime.selection.interface import Selector


@dataclass(frozen=True)
class LayerData:
    """One layer over a batch of contexts, which are concatenated along the heads, because heads are independent.

    keys, values [batch Hk, N, D]; query [batch Hq, Q, D] of the step, of Q questions over each context; tail
    [batch Hq, R, D], held-out queries, which methods may calibrate on or observe; sampled [batch Hq, P, D], the
    contexts' own queries at positions [P], for indexers that are built from queries. `stored`: keys and values are what
    these tensors in 8 bits mean, which our steps read.
    """

    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor
    tail: torch.Tensor
    sampled: torch.Tensor
    positions: torch.Tensor
    batch: int
    split: Split
    facts: LayerFacts
    # Layer 31 of 32, alone: with methods that share selections between layers it finds none and makes its own.
    position: LayerPosition = field(default_factory=lambda: LayerPosition(31, 32))
    stored: Mapping[str, torch.Tensor] | None = None

    @property
    def questions(self) -> int:
        """Q."""
        return self.query.shape[1]

    @property
    def middle(self) -> slice:
        """The middle tokens."""
        return slice(self.split.sinks, self.split.sinks + self.split.middle)

    def of_heads(self, heads: slice) -> "LayerData":
        """The same layer with some of its KV heads, and with their query heads."""
        group = len(self.query) // len(self.keys)
        own = slice(heads.start * group, heads.stop * group)
        some: dict[str, Any] = {name: getattr(self, name)[heads] for name in ("keys", "values")}
        if self.stored is not None:
            some["stored"] = {name: rows[heads] for name, rows in self.stored.items()}
        return replace(self, **some, **{name: getattr(self, name)[own] for name in ("query", "tail", "sampled")})

    def in_8_bits(self) -> "LayerData":
        """The same layer with keys and values as 8 bits hold them, which its steps read."""
        stored = quantise(self.keys, self.values)
        keys, values = context_rows(stored, self.keys.dtype).part(slice(None))
        return replace(self, keys=keys, values=values, stored=stored)

    def row_bytes(self) -> int:
        """Bytes of one key or value of one head, in the dtype of queries."""
        return self.keys.shape[2] * self.keys.element_size()

    def saved(self, rows: float) -> float:
        """Bytes that so many keys and values of each head take less where they are read in 8 bits."""
        return (
            0.0 if self.stored is None else len(self.keys) * rows * (self.row_bytes() - row_bytes(self.keys.shape[2]))
        )

    def context(
        self,
        tensors: dict[str, torch.Tensor],
        calibration: dict[str, object] | None = None,
        parameters: dict[str, object] | None = None,
    ) -> MiddleContext:
        """A method's input, from its indexer's tensors, whose token order counts from the prompt's first token."""
        stored = tensors if self.stored is None else with_centroids_in_8_bits(tensors)
        tensors, in_8_bits = read_centroids(stored, self.keys.dtype)
        if "token_order" in tensors:
            tensors["token_order"] = tensors["token_order"] - self.split.sinks
        return MiddleContext(
            load_keys=lambda: self.keys[:, self.middle],
            load_values=lambda: self.values[:, self.middle],
            load_observed=lambda: self.tail.unflatten(0, (len(self.keys), -1)),
            facts=self.facts,
            tensors=tensors,
            calibration=calibration or {},
            parameters=parameters or {},
            first_token=self.split.sinks,
            position=self.position,
            centroids_in_8_bits=in_8_bits,
        )


def lay_out(data: LayerData, selector: Selector) -> MiddleRows:
    """The middle in a selector's layout; allocates a copy of its keys and values."""
    if data.stored is not None:
        return RowsIn8Bits(of_tokens(data.stored, data.middle), selector.layout, data.keys.dtype)
    keys, values = data.keys[:, data.middle], data.values[:, data.middle]
    return MemoryRows(keys, values, selector.layout, data.keys.device)


def dense_layer(data: LayerData) -> DenseLayer:
    """Our dense attention, as decoding has it."""
    if (stored := data.stored) is not None:
        return DenseLayerIn8Bits(lambda: stored, data.keys[:, :0], data.keys.shape[1])
    return DenseLayer(data.keys, data.values)


def sparse_layer(data: LayerData, rows: MiddleRows, selector: Selector, config: DecodeConfig) -> SparseLayer:
    """A sparse cache layer, as decoding makes it from the config; allocates a copy of sinks and tail."""
    exact = tuple(
        torch.cat([tokens[:, : data.middle.start], tokens[:, data.middle.stop :]], 1)
        for tokens in (data.keys, data.values)
    )
    device = data.keys.device
    parts = LayerParts(0, selector, rows, data.facts, data.split.sinks, len(exact[0]), device, device)
    return SparseLayer((exact[0], exact[1]), data.split, plan_layer(parts, config))


def layer_step(data: LayerData, layer: StoredLayer) -> Step:
    """A step from the query to the output [batch Hq, Q, D], selection included, as a model calls it."""
    if data.questions > 1:
        return _shared_step(data, layer)
    nothing = data.keys[:, :0]
    call = AttentionCall(0, data.query, nothing, nothing, data.facts.softmax_scale, data.facts.softcap, None, None)
    return lambda: layer.attend(call)


def _shared_step(data: LayerData, layer: StoredLayer) -> Step:
    """No question sees a row of its own, so that the output is that of attention to the context."""
    packed, each = packed_layer(layer, data.questions), torch.arange(data.questions, device=data.keys.device)
    step = PackedStep(each, torch.full_like(each, -1), (each + 1).int(), each, (), 1)
    new = data.keys.new_zeros(len(data.keys), data.questions, data.keys.shape[2])
    call = AttentionCall(0, data.query, new, new, data.facts.softmax_scale, data.facts.softcap, None, None)
    return lambda: packed.attend(call, step)


def exact_output(data: LayerData) -> torch.Tensor:
    """Dense attention in float32, [batch Hq, Q, D]; converts one head's keys and values at a time.

    In plain torch, so that it is independent of the kernels that are timed.
    """
    grouped, scale = data.query.float().unflatten(0, (len(data.keys), -1)), data.facts.softmax_scale
    parts = [
        (query @ keys.float().T * scale).softmax(-1) @ values.float()
        for query, keys, values in zip(grouped, data.keys, data.values, strict=True)
    ]
    return torch.cat(parts)


def relative_error(output: torch.Tensor, exact: torch.Tensor) -> float:
    """Mean over query heads and questions of |output - exact| / |exact|; both [batch Hq, Q, D]."""
    return float(((output.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())
