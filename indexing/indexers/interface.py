"""The interface of indexers, the offline halves of methods; each method is a file in `indexing/methods`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.schema import LayerFacts, Split

LARGEST_SEED = 2**31 - 1  # the largest that faiss accepts
MOST_ITERATIONS = 10_000


def check_iterations(iterations: int) -> None:
    """Raise UsageError for a number of k-means iterations below 1 or above MOST_ITERATIONS."""
    if not 1 <= iterations <= MOST_ITERATIONS:
        raise UsageError(f"--iterations {iterations}: give a number from 1 to {MOST_ITERATIONS}")


@dataclass(frozen=True)
class LayerInput:
    """What a method builds from: one layer's middle keys and values [Hk, M, D], and how the layer attends.

    `queries` [Hq, P, D] are the queries at `positions` [P], rising, a sample of the middle; None unless the method's
    `queries_wanted` is above 0. `sink_keys` [Hk, S, D] are the keys before the middle, `sink_logits` [Hq] the learned
    attention-sink logits of models that have them.
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
    """What a method calibrates on: the tensors that it built for a layer, and the held-out queries [Hq, R, D]."""

    tensors: dict[str, torch.Tensor]
    tail_queries: torch.Tensor
    facts: LayerFacts


@dataclass(frozen=True)
class Indexer(ABC):
    """One method's offline half: a frozen dataclass whose fields are its parameters and command-line options."""

    revision: ClassVar[int] = 1
    """Raised when the same parameters give other tensors than before: no build reuses files of another revision."""
    takes_tokens: ClassVar[bool] = False
    """Whether it has `append_layer`: the tokens of an append join what is there."""
    learns: ClassVar[bool] = False
    """Whether it keeps what it learned of the tokens before those that it takes in, and may serve many of these worse:
    an append builds it anew at certain lengths of the text (`append.learning_again`)."""
    by_default: ClassVar[bool] = False
    """Whether it is built where no method is named."""
    seed: int = field(default=0, metadata={"help": "Seed of everything random in a build."})

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UsageError(f"--seed {self.seed}: give a number from 0 to {LARGEST_SEED}")

    def queries_wanted(self) -> int:
        """How many of the prompt's queries, per KV head, the method builds from; 0: none."""
        return 0

    def check_channels(self, head_dim: int) -> None:
        """Raise UsageError if the method cannot be built for heads of so many channels; asked before the prefill."""
        return

    def bytes_per_token(self, head_dim: int) -> float:
        """Bytes of its files per middle token and KV head, if they are large compared with keys and values; else 0."""
        return 0.0

    @abstractmethod
    def build_layer(self, layer: LayerInput) -> dict[str, torch.Tensor]:
        """Build the index's tensors for one layer, by name.

        On a CPU several threads call it at a time, each for a layer and without gradients; what it changes is its own.
        """

    def append_layer(
        self, tensors: dict[str, torch.Tensor], layer: LayerInput, old_middle: int
    ) -> dict[str, torch.Tensor]:
        """Build the index's tensors for one layer whose middle has grown; only methods with `takes_tokens` have this.

        Args:
            tensors: those built for the first `old_middle` tokens of the middle, with the same parameters.
        """
        raise NotImplementedError

    def calibrate(self, layers: Callable[[], Iterator[BuiltLayer]]) -> dict[str, Any]:
        """Numbers for the manifest that need all layers; each call of `layers()` iterates over the layers again."""
        return {}
