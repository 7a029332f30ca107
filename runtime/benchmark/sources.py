"""Layers for timing decode steps, from a synthetic mixture or from an index on disk."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.context_rows import Int8Stored
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import MethodRecord
from sparsekv.formats.models.load import DTYPES
from sparsekv.runtime.benchmark.layer import LayerData, Shape, mixture
from sparsekv.runtime.benchmark.settings import LAYER_METHODS, Wanted
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.prepare import stored_context
from sparsekv.runtime.selection.interface import LayerPosition, MiddleContext
from sparsekv.runtime.selection.registry import choose_methods, methods_of

HEADS_AT_ONCE = 8  # number of KV heads for which a method's tensors are built together
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Indexed:
    """A method's input for a layer, and the manifest's record of the method. `record` is None without an index."""

    context: MiddleContext
    record: MethodRecord | None


class LayerIndexer(ABC):
    """Builds the tensors of a method for a layer in memory.

    Callers pass an implementation, because this package must not import `indexing`. `parameters` is a dataclass with
    the parameters of the build.
    """

    parameters: Any

    @abstractmethod
    def queries_wanted(self) -> int:
        """Return the number of queries of the context's tokens that the build needs per KV head; 0: none."""

    @abstractmethod
    def build(self, data: LayerData) -> Tensors:
        """Build the tensors of a layer, by name."""

    @abstractmethod
    def record(self, tensors: Tensors, data: LayerData) -> MethodRecord:
        """Make the manifest's record of the method, as if this layer were an index.

        The record's calibration is computed from the layer's tensors and held-out queries.
        """


def index_mixture(data: LayerData, indexer: LayerIndexer | None) -> Indexed:
    """Build a method's tensors for a layer, and from them the method's input. Without an indexer there are no tensors.

    Needs the memory of the indexer for `HEADS_AT_ONCE` heads. The calibration uses at most this number of heads.
    """
    if indexer is None:
        return Indexed(data.context({}), None)
    pieces = [data.of_heads(heads) for heads in _pieces(len(data.keys))]
    built = [indexer.build(piece) for piece in pieces]
    # The calibration uses only some heads, because one calibration serves all layers of a model anyway.
    some = min(1, len(pieces) - 1)
    record = indexer.record(built[some], pieces[some])
    return Indexed(data.context(_join(built), record.calibration, record.parameters), record)


def _pieces(heads: int) -> list[slice]:
    """Split the heads into pieces of at most HEADS_AT_ONCE heads.

    If there are several pieces, the first piece is a single head. By comparing the tensors of the first two pieces,
    `_join` finds out whether a tensor has a head axis.
    """
    if heads <= HEADS_AT_ONCE:
        return [slice(0, heads)]
    starts = [0, *range(1, heads, HEADS_AT_ONCE)]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], heads], strict=True)]


def _join(pieces: list[Tensors]) -> Tensors:
    """Concatenate the tensors of pieces along the heads. A tensor without a head axis is equal in all pieces."""
    first, *others = pieces
    by_head = {name for name, one in first.items() if others and len(one) == 1 and len(others[0][name]) > 1}
    return {name: torch.cat([piece[name] for piece in pieces]) if name in by_head else first[name] for name in first}


def middle_layer(artifact: Artifact) -> int:
    """Return the index of the layer in the middle of an index's indexed layers."""
    indexed = artifact.manifest.indexed_layers
    return indexed[len(indexed) // 2]


def stored_layer(artifact: Artifact, layer: int | None, device: torch.device, dtype: torch.dtype) -> LayerData:
    """Read layer `layer` of an index; None: the middle one of the indexed layers.

    The queries of the steps are the later half of the tail's queries. Allocates the layer's keys and values in `dtype`.

    Raises:
        UsageError: the index has no such layer, or torch's dense attention does not support the layer's attention.
    """
    manifest = artifact.manifest
    indexed = manifest.indexed_layers
    number = middle_layer(artifact) if layer is None else layer
    if number not in indexed:
        raise UsageError(f"--layer {number}: the indexed layers are {', '.join(map(str, indexed))}")
    facts = manifest.attending[number]
    if facts.softcap is not None or facts.attention_sinks:
        what = "learned sinks" if facts.attention_sinks else "a soft cap"
        raise UsageError(
            f"the attention of layer {number} has {what}, which torch's dense attention, the baseline, does "
            "not support; give the index of another model"
        )
    return layer_of(artifact, number, device, dtype)


def layer_of(artifact: Artifact, number: int, device: torch.device, dtype: torch.dtype) -> LayerData:
    """Read an indexed layer. The queries of the steps are the later half of the tail's queries.

    Allocates the layer's keys and values in `dtype`.
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
        facts=manifest.attending[number],
        position=LayerPosition(indexed.index(number), len(indexed)),
        # Steps on a CPU read dequantised rows, as in decoding.
        stored=rows.tensors if isinstance(rows, Int8Stored) and device.type == "cuda" else None,
    )


def asked(data: LayerData, questions: int) -> LayerData:
    """Return a stored layer with `questions` of its queries: the last one, and others evenly spaced before it.

    Raises:
        UsageError: `questions` is below 1, or the layer has fewer queries.
    """
    known = data.questions
    if not 1 <= questions <= known:
        raise UsageError(
            f"--batch {questions}: give 1 to {known}, which is half the number of queries of the index's tail"
        )
    places = torch.linspace(known - 1, 0, questions, device=data.query.device).round().long()
    return replace(data, query=data.query[:, places].contiguous())


def asked_by_many(data: LayerData, questions: int) -> LayerData:
    """Return the stored layer `data` with `questions` queries, which may be more than `data` has.

    Queries beyond the layer's own are random, with the same mean square. They select other tokens than the layer's own
    queries, as the queries of other questions do. Raises UsageError if `questions` is below 1.
    """
    own = asked(data, min(questions, data.questions))
    heads, known, channels = own.query.shape
    generator = torch.Generator(own.query.device).manual_seed(0)
    drawn = torch.randn(heads, questions - known, channels, generator=generator, device=own.query.device)
    drawn *= own.query.float().square().mean().sqrt()
    return replace(own, query=torch.cat([own.query, drawn.to(own.query.dtype)], 1))


def stored_index(data: LayerData, artifact: Artifact, name: str) -> Indexed:
    """Return the input of a method, with the index's tensors, for the layer `data` that was read from the index."""
    number = artifact.manifest.indexed_layers[data.position.number]
    context = stored_context(LayerRows(artifact, number), name, data.keys.device)
    context = replace(
        context, load_keys=lambda: data.keys[:, data.middle], load_values=lambda: data.values[:, data.middle]
    )
    return Indexed(context, artifact.manifest.methods.get(name))


LEAST_CONTEXT, LARGEST_SEED = 512, 2**31 - 1
UNITS = {"": 1, "K": 2**10, "M": 2**20}


@dataclass(frozen=True)
class Sizes:
    """Default sizes for a device."""

    contexts: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str


SMALL = Sizes(("8K", "32K"), 9, 3, 64, "float32")
LARGE = Sizes(("128K",), 32, 8, 128, "bfloat16")


class Mixtures:
    """Synthetic layers for each context length and batch. `indexed`: names of methods whose index can be built."""

    less_memory: ClassVar[str] = "choose a smaller --context or --batch"

    def __init__(self, wanted: Wanted, device: torch.device, indexed: Sequence[str]):
        self.indexed = indexed
        sizes = LARGE if device.type == "cuda" else SMALL
        self.device, self.seed, self.batches = device, wanted.seed, wanted.batches or [1]
        self.shared, self.kv_dtype = wanted.shared, wanted.kv_dtype
        self.dtype = sizes.dtype if wanted.dtype == "auto" else wanted.dtype
        self.heads = sizes.heads if wanted.heads is None else wanted.heads
        self.kv_heads = sizes.kv_heads if wanted.kv_heads is None else wanted.kv_heads
        self.head_dim = sizes.head_dim if wanted.head_dim is None else wanted.head_dim
        self.contexts = [_tokens(text) for text in wanted.contexts or sizes.contexts]
        self._check()

    def _check(self) -> None:
        if self.kv_dtype is not None and self.device.type == "cpu":
            raise UsageError(
                f"--kv-dtype {self.kv_dtype}: on a CPU steps read dequantised rows, so that the option does not change "
                "their times; leave it out, or give --device cuda"
            )
        for batch in self.batches:
            if batch < 1:
                raise UsageError(f"--batch {batch}: give at least 1")
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise UsageError(f"--heads {self.heads}: give a multiple of --kv-heads, which is {self.kv_heads}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise UsageError(f"--head-dim {self.head_dim}: give an even number, such as 128")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UsageError(f"--seed {self.seed}: give a number from 0 to {LARGEST_SEED}")

    def methods(self, names: list[str]) -> list[str]:
        """Return the names of the methods to time. Raises UsageError for a method that cannot run."""
        return choose_methods(names or list(LAYER_METHODS), list(self.indexed))

    def layers(self, built: Mapping[str, LayerIndexer]) -> Iterator[LayerData]:
        """Yield the layers one at a time. Each layer is generated when the caller asks for it."""
        for context in dict.fromkeys(self.contexts):
            for batch in dict.fromkeys(self.batches):
                yield self.layer(context, batch, built)

    def layer(self, context: int, batch: int, built: Mapping[str, LayerIndexer], number: int = 0) -> LayerData:
        """Generate one layer. Layers with different `number` have different seeds."""
        sampled = max((indexer.queries_wanted() for indexer in built.values()), default=0)
        shape = Shape(context, self.heads, self.kv_heads, self.head_dim)
        contexts, questions = (1, batch) if self.shared else (batch, 1)
        seed, dtype = self.seed + number * contexts, DTYPES[self.dtype]
        data = mixture(shape, contexts, seed, self.device, dtype, sampled, questions)
        return data if self.kv_dtype is None else data.in_8_bits()

    def index(self, data: LayerData, name: str, indexer: LayerIndexer | None) -> Indexed:
        """Build a method's input for a layer."""
        return index_mixture(data, indexer)

    def about(self) -> dict[str, Any]:
        """Return the settings of the measurement. They are shown with the results."""
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "dtype": self.dtype}
        return {"data": "mixture", "seed": self.seed, **sizes, "kv_dtype": self.kv_dtype or self.dtype}


class StoredLayerSource:
    """One layer of an index, for each requested number of questions, with the tensors of the index's methods."""

    less_memory: ClassVar[str] = "leave --index out and choose a --context, or give --device cpu"

    def __init__(self, artifact: Artifact, layer: int | None, wanted: Wanted, device: torch.device):
        sizes = {"context": wanted.contexts, "batch": [] if wanted.shared else wanted.batches}
        sizes |= {name: getattr(wanted, name) for name in ("heads", "kv_heads", "head_dim", "kv_dtype")}
        for name, value in sizes.items():
            if value not in (None, []):
                raise UsageError(
                    f"--{name.replace('_', '-')}: with --index, the index determines this value; leave the option out"
                )
        self.artifact = artifact
        self.dtype = artifact.manifest.dtype if wanted.dtype == "auto" else wanted.dtype
        self.data = stored_layer(artifact, layer, device, DTYPES[self.dtype])
        self.asked = [asked(self.data, number) for number in dict.fromkeys(wanted.batches or [1])]

    def methods(self, names: list[str]) -> list[str]:
        usable = methods_of(self.artifact)
        default = [name for name in LAYER_METHODS if name in usable]
        return methods_of(self.artifact, names or default)

    def layers(self, built: Mapping[str, LayerIndexer]) -> Iterator[LayerData]:
        yield from self.asked

    def index(self, data: LayerData, name: str, indexer: LayerIndexer | None) -> Indexed:
        return stored_index(data, self.artifact, name)

    def about(self) -> dict[str, Any]:
        heads = {"heads": len(self.data.query), "kv_heads": len(self.data.keys), "head_dim": self.data.keys.shape[2]}
        layer = self.artifact.manifest.indexed_layers[self.data.position.number]
        read = self.dtype if self.data.stored is None else "int8"
        return {"data": str(self.artifact.folder), "layer": layer, **heads, "dtype": self.dtype, "kv_dtype": read}


Source = Mixtures | StoredLayerSource
"""Source of layers, and of the inputs of methods for the layers."""


def _tokens(text: str) -> int:
    """Parse a number of tokens such as `32768`, `32K` or `1M`. Raises UsageError below LEAST_CONTEXT."""
    found = re.fullmatch(r"(\d+)([KM]?)", text.upper())
    tokens = int(found[1]) * UNITS[found[2]] if found else 0
    if tokens < LEAST_CONTEXT:
        raise UsageError(f"--context {text}: give a number of tokens such as 32768 or 128K, at least {LEAST_CONTEXT}")
    return tokens
