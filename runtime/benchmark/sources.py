"""Where `sparsekv bench` takes its layers from: a mixture of clusters, or one layer of an index."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.kv_storage import KVDtype
from sparsekv.formats.models.load import DTYPES
from sparsekv.formats.reader import Artifact
from sparsekv.formats.suggestions import choose_one
from sparsekv.runtime.benchmark.indexed_layers import (
    Indexed,
    LayerIndexer,
    asked,
    index_mixture,
    stored_index,
    stored_layer,
)
from sparsekv.runtime.benchmark.layer import LayerData
from sparsekv.runtime.benchmark.mixture import Shape, mixture
from sparsekv.runtime.selection.registry import choose_methods, methods_of

DEFAULT_METHODS = ("squeezed", "multipole", "quest", "window")
LEAST_CONTEXT, LARGEST_SEED = 512, 2**31 - 1
UNITS = {"": 1, "K": 2**10, "M": 2**20}


@dataclass(frozen=True)
class Wanted:
    """What a person said of a layer's sizes; None or nothing where it is left to the device or the index. `shared`: the
    batches are of questions over one context. `kv_dtype`: what keys and values are stored in, None for the dtype."""

    contexts: list[str]
    batches: list[int]
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    dtype: str
    seed: int
    shared: bool = False
    kv_dtype: KVDtype | None = None


@dataclass(frozen=True)
class Sizes:
    """What is measured where a person does not say it."""

    contexts: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str


SMALL = Sizes(("8K", "32K"), 9, 3, 64, "float32")
LARGE = Sizes(("128K",), 32, 8, 128, "bfloat16")


class Source(ABC):
    """Layers and what methods choose from in them."""

    @abstractmethod
    def methods(self, names: list[str]) -> list[str]:
        """Those to time, of the names that were given; UsageError for one that cannot run."""

    @abstractmethod
    def layers(self, built: Mapping[str, LayerIndexer]) -> Iterator[LayerData]:
        """One at a time; each is made when it is asked for."""

    @abstractmethod
    def index(self, data: LayerData, name: str, indexer: LayerIndexer | None) -> Indexed:
        """What a method chooses from in one of the layers."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What a reader of the figures has to know."""


class Mixtures(Source):
    """Every context with every batch; indices are built on the spot, for methods that are in `indexed` or need none."""

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
                f"--kv-dtype {self.kv_dtype}: on a CPU steps read rows that were restored, so that its times are those "
                "without it; leave it out, or give --device cuda"
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
        return choose_methods(names or list(DEFAULT_METHODS), list(self.indexed))

    def layers(self, built: Mapping[str, LayerIndexer]) -> Iterator[LayerData]:
        for context in dict.fromkeys(self.contexts):
            for batch in dict.fromkeys(self.batches):
                yield self.layer(context, batch, built)

    def layer(self, context: int, batch: int, built: Mapping[str, LayerIndexer], number: int = 0) -> LayerData:
        """One layer; those of other numbers are drawn from other seeds."""
        sampled = max((indexer.queries_wanted() for indexer in built.values()), default=0)
        shape = Shape(context, self.heads, self.kv_heads, self.head_dim)
        contexts, questions = (1, batch) if self.shared else (batch, 1)
        seed, dtype = self.seed + number * contexts, DTYPES[self.dtype]
        data = mixture(shape, contexts, seed, self.device, dtype, sampled, questions)
        return data if self.kv_dtype is None else data.in_8_bits()

    def index(self, data: LayerData, name: str, indexer: LayerIndexer | None) -> Indexed:
        return index_mixture(data, indexer)

    def about(self) -> dict[str, Any]:
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "dtype": self.dtype}
        return {"data": "mixture", "seed": self.seed, **sizes, "kv_dtype": self.kv_dtype or self.dtype}


class StoredLayerSource(Source):
    """One layer of an index, with the indices that it holds."""

    def __init__(self, artifact: Artifact, layer: int | None, wanted: Wanted, device: torch.device):
        sizes = {"context": wanted.contexts, "batch": [] if wanted.shared else wanted.batches}
        sizes |= {name: getattr(wanted, name) for name in ("heads", "kv_heads", "head_dim", "kv_dtype")}
        for name, value in sizes.items():
            if value not in (None, []):
                raise UsageError(f"--{name.replace('_', '-')}: with --index that is the index's; leave it out")
        self.artifact = artifact
        self.dtype = artifact.manifest.dtype if wanted.dtype == "auto" else wanted.dtype
        self.data = stored_layer(artifact, layer, device, DTYPES[self.dtype])
        self.asked = [asked(self.data, number) for number in dict.fromkeys(wanted.batches or [1])]

    def methods(self, names: list[str]) -> list[str]:
        usable = methods_of(self.artifact)
        default = [name for name in DEFAULT_METHODS if name in usable]
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


def _tokens(text: str) -> int:
    """`32768`, `32K` and `1M`."""
    found = re.fullmatch(r"(\d+)([KM]?)", text.upper())
    tokens = int(found[1]) * UNITS[found[2]] if found else 0
    if tokens < LEAST_CONTEXT:
        raise UsageError(f"--context {text}: give a number of tokens such as 32768 or 128K, at least {LEAST_CONTEXT}")
    return tokens


def check_dtype(dtype: str) -> None:
    """Raise UsageError for a dtype that there is not."""
    if dtype not in ("auto", *DTYPES):
        raise UsageError(f"--dtype {dtype}: {choose_one(dtype, ('auto', *DTYPES))}")
