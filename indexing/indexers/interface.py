"""What an indexing method is, and the registry that finds them: one file a method, named nowhere else."""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch

import sparsekv.indexing.methods
from sparsekv.formats.errors import UsageError
from sparsekv.formats.schema import LayerFacts, Split

LARGEST_SEED = 2**31 - 1  # what faiss takes


@dataclass(frozen=True)
class LayerInput:
    """What a method builds from: one layer's middle keys and values [Hk, M, D], and how the layer attends.

    `queries` [Hq, P, D] are those of a sample of the middle's `positions` [P], rising, for methods that want some.
    `sink_keys` [Hk, S, D] are the keys before the middle; `sink_logits` [Hq] those that a model learned, if it did.
    """

    keys: torch.Tensor
    values: torch.Tensor
    facts: LayerFacts
    split: Split
    queries: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    sink_keys: torch.Tensor | None = None
    sink_logits: torch.Tensor | None = None


@dataclass(frozen=True)
class BuiltLayer:
    """What a method calibrates on: what it built for a layer, and the held-out queries [Hq, R, D]."""

    tensors: dict[str, torch.Tensor]
    tail_queries: torch.Tensor
    facts: LayerFacts


@dataclass(frozen=True)
class Indexer(ABC):
    """One method's offline half: a frozen dataclass whose fields are its parameters and command-line options."""

    revision: ClassVar[int] = 1
    takes_tokens: ClassVar[bool] = False
    by_default: ClassVar[bool] = True
    seed: int = field(default=0, metadata={"help": "Seed of everything random in a build."})

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UsageError(f"--seed {self.seed}: give a number from 0 to {LARGEST_SEED}")

    def queries_wanted(self) -> int:
        """How many queries of the prompt, per KV head, the method builds from; 0: none."""
        return 0

    def bytes_per_token(self, head_dim: int) -> float:
        """Bytes that its files take for each middle token and KV head, where that is much beside keys and values."""
        return 0.0

    @abstractmethod
    def build_layer(self, layer: LayerInput) -> dict[str, torch.Tensor]:
        """The artifact's tensors for one layer."""

    def append_layer(
        self, tensors: dict[str, torch.Tensor], layer: LayerInput, old_middle: int
    ) -> dict[str, torch.Tensor]:
        """The artifact's tensors for one layer whose middle has grown; only methods with `takes_tokens` have this.

        Args:
            tensors: the ones made for the first `old_middle` tokens of the middle, with the same parameters.
        """
        raise NotImplementedError

    def calibrate(self, layers: Callable[[], Iterator[BuiltLayer]]) -> dict[str, Any]:
        """Numbers that need all layers, for the manifest; `layers()` walks them anew at each call."""
        return {}


INDEXERS: dict[str, type[Indexer]] = {}
T = TypeVar("T", bound=type[Indexer])


def register(name: str) -> Callable[[T], T]:
    """Class decorator: makes a method known to every command under this name."""

    def add(indexer: T) -> T:
        INDEXERS[name] = indexer
        return indexer

    return add


def indexers() -> dict[str, type[Indexer]]:
    """All registered methods by name; imports every file of `indexing/methods` once."""
    for module in pkgutil.iter_modules(sparsekv.indexing.methods.__path__):
        importlib.import_module(f"sparsekv.indexing.methods.{module.name}")
    return dict(sorted(INDEXERS.items()))


def choose_indexers(names: list[str]) -> list[str]:
    """Names of the methods to build: all of them for `all`, those that are built by default for an empty list.

    Raises:
        UsageError: a method that does not exist.
    """
    known = indexers()
    for name in names:
        if name not in known and name != "all":
            raise UsageError(f"no method '{name}' can be built; there are: {', '.join(known)}")
    if not names:
        return [name for name, indexer in known.items() if indexer.by_default]
    return list(known) if "all" in names else list(dict.fromkeys(names))
