"""Layers to time steps on: of a mixture, with indices built on the spot, or of an index on disk."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparsekv.formats.context_rows import Int8Rows
from sparsekv.formats.errors import UsageError
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import LayerFacts, MethodRecord
from sparsekv.runtime.benchmark.layer import LayerData
from sparsekv.runtime.cache.layer_rows import LayerRows
from sparsekv.runtime.decoding.prepare import stored_context
from sparsekv.runtime.selection.context import LayerPosition, MiddleContext

HEADS_AT_ONCE = 8  # KV heads that an index is built for together
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Indexed:
    """What a method chooses from in a layer, and the record of its index, if it has one."""

    context: MiddleContext
    record: MethodRecord | None


class LayerIndexer(ABC):
    """Builds a method's tensors of a layer that is in memory; handed in, because a step needs nothing else of building.

    `parameters` is a dataclass of what it builds with.
    """

    parameters: Any

    @abstractmethod
    def queries_wanted(self) -> int:
        """How many of the contexts' own queries, per KV head, it builds from; 0: none."""

    @abstractmethod
    def build(self, data: LayerData) -> Tensors:
        """The tensors of a layer, by name."""

    @abstractmethod
    def record(self, tensors: Tensors, data: LayerData) -> MethodRecord:
        """What a manifest would say of these tensors of a layer, calibrated on its tail."""


def index_mixture(data: LayerData, indexer: LayerIndexer | None) -> Indexed:
    """Build a method's tensors; None: it needs none.

    Memory: what the indexer takes for `HEADS_AT_ONCE` heads at a time; calibration for no more.
    """
    if indexer is None:
        return Indexed(data.context({}), None)
    pieces = [data.of_heads(heads) for heads in _pieces(len(data.keys))]
    built = [indexer.build(piece) for piece in pieces]
    # Of some heads: what is calibrated holds for all layers of a model.
    some = min(1, len(pieces) - 1)
    record = indexer.record(built[some], pieces[some])
    return Indexed(data.context(_join(built), record.calibration, record.parameters), record)


def _pieces(heads: int) -> list[slice]:
    """All heads at once; else the first by itself, so that shapes tell which tensors have an axis of heads."""
    if heads <= HEADS_AT_ONCE:
        return [slice(0, heads)]
    starts = [0, *range(1, heads, HEADS_AT_ONCE)]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], heads], strict=True)]


def _join(pieces: list[Tensors]) -> Tensors:
    """The tensors of all heads; one without an axis of heads is the same in every piece."""
    first, *others = pieces
    by_head = {name for name, one in first.items() if others and len(one) == 1 and len(others[0][name]) > 1}
    return {name: torch.cat([piece[name] for piece in pieces]) if name in by_head else first[name] for name in first}


def stored_layer(artifact: Artifact, layer: int | None, device: torch.device, dtype: torch.dtype) -> LayerData:
    """A layer of an index, by default the middle one; its queries are the later half of the held-out tail's.

    Memory: keys and values in `dtype`.

    Raises:
        UsageError: no such layer, or one whose attention torch's own does not compute.
    """
    manifest = artifact.manifest
    indexed = manifest.indexed_layers
    number = indexed[len(indexed) // 2] if layer is None else layer
    if number not in indexed:
        raise UsageError(f"--layer {number}: the index has {', '.join(map(str, indexed))}")
    _refuse_unlike(manifest.layers[number], number)
    return layer_of(artifact, number, device, dtype)


def layer_of(artifact: Artifact, number: int, device: torch.device, dtype: torch.dtype) -> LayerData:
    """One indexed layer of an index; its queries are the later half of the held-out tail's.

    Memory: keys and values in `dtype`.
    """
    manifest = artifact.manifest
    indexed = manifest.indexed_layers
    rows = artifact.context_rows(number, device)
    keys, values = (one.to(dtype) for one in rows.part(slice(None)))
    tail = artifact.queries(number, device)["tail"].to(dtype)
    return LayerData(
        keys=keys,
        values=values,
        query=tail[:, tail.shape[1] // 2 :],
        tail=tail[:, : tail.shape[1] // 2],
        sampled=tail[:, :0],
        positions=torch.arange(0, device=device),
        batch=1,
        split=manifest.split,
        facts=manifest.layers[number],
        position=LayerPosition(indexed.index(number), len(indexed)),
        # As decoding has it: on a CPU steps read restored rows.
        stored=rows.tensors if isinstance(rows, Int8Rows) and device.type == "cuda" else None,
    )


def asked(data: LayerData, questions: int) -> LayerData:
    """A stored layer with so many of its queries, the last and others evenly spaced before it.

    Raises:
        UsageError: it has fewer.
    """
    known = data.questions
    if not 1 <= questions <= known:
        raise UsageError(f"--batch {questions}: give 1 to {known}, half the held-out queries of the index")
    places = torch.linspace(known - 1, 0, questions, device=data.query.device).round().long()
    return replace(data, query=data.query[:, places].contiguous())


def _refuse_unlike(facts: LayerFacts, number: int) -> None:
    if facts.softcap is not None or facts.attention_sinks:
        what = "learned sinks" if facts.attention_sinks else "a soft cap"
        raise UsageError(
            f"the attention of layer {number} has {what}, which torch's own dense attention has not, so there is "
            "nothing to compare with; bench an index of another model"
        )


def stored_index(data: LayerData, artifact: Artifact, name: str) -> Indexed:
    """What the index holds for a method in a layer that `stored_layer` gave."""
    number = artifact.manifest.indexed_layers[data.position.number]
    context = stored_context(LayerRows(artifact, number), name, data.keys.device).context
    context = replace(
        context, load_keys=lambda: data.keys[:, data.middle], load_values=lambda: data.values[:, data.middle]
    )
    return Indexed(context, artifact.manifest.methods.get(name))
