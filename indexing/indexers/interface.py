"""Interface and registry of indexers, which build a method's tensors, and calibration of score thresholds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch

from sparsekv.formats.errors import AUTO_ELSEWHERE, UsageError, suggestion
from sparsekv.formats.index.schema import AUTO, LayerFacts, RopeFacts, Split, given_parameters
from sparsekv.formats.registry import Registry

Tensors = dict[str, torch.Tensor]
"""A method's tensors of one layer, by name."""
LOWEST = -60.0
BINS = 6000
SHARES: list[float] = torch.logspace(-6, 0, 121, dtype=torch.float64).tolist()


class KeepCurve:
    """Distribution of cluster scores over layers, heads and queries, weighted by the token count of each cluster.

    From it follow the share of tokens that a score threshold keeps, and the threshold that keeps a share. The curve is
    a histogram of log2 scores, whose size does not grow with the context.
    """

    def __init__(self) -> None:
        self.weight = torch.zeros(BINS, dtype=torch.float64)
        self.tokens = 0.0

    def add(self, scores: torch.Tensor, counts: torch.Tensor, tokens: float) -> None:
        """Add the scores [Hk, Q, C] of clusters for Q queries; `counts` [Hk, Q or 1, C] are the clusters' tokens.

        `tokens` is the number of all tokens of a head. The curve's shares are shares of this number.
        """
        bins = _bins(scores)
        weights = counts.expand_as(scores).double()
        # The counts are summed on the scores' device, because there may be millions of scores. The order of atomic
        # additions does not matter, because sums of integers are exact.
        added = torch.zeros(BINS, dtype=torch.float64, device=scores.device)
        self.weight += added.scatter_add_(0, bins.flatten(), weights.flatten()).cpu()
        self.tokens += tokens * scores.shape[0] * scores.shape[1]

    def threshold(self, keep: float) -> float:
        """Return the highest score threshold that keeps clusters with at least the share `keep` of all tokens.

        The threshold 0 keeps all clusters.
        """
        return self._thresholds([keep])[0]

    def _thresholds(self, shares: list[float]) -> list[float]:
        kept = self.weight.flip(0).cumsum(0) / self.tokens
        passed = torch.searchsorted(kept, torch.tensor(shares, dtype=torch.float64)).tolist()
        # The lowest bin also counts all smaller scores, and so only a threshold of 0 keeps all clusters of this bin.
        return [
            0.0 if bins >= BINS - 1 or keep >= 1 else 2.0 ** (LOWEST + (BINS - 1 - bins) * (-LOWEST / BINS))
            for bins, keep in zip(passed, shares, strict=True)
        ]

    def share_above(self, threshold: float) -> float:
        """Return the share of all tokens that are in clusters with a score of at least `threshold`."""
        first = 0 if threshold <= 0 else int(_bins(torch.tensor([threshold])))
        return float(self.weight[first:].sum()) / self.tokens

    def points(self) -> list[list[float]]:
        """Return [[share of tokens kept, score threshold], ...] for shares rising from 0.000001 to 1."""
        return [[keep, threshold] for keep, threshold in zip(SHARES, self._thresholds(SHARES), strict=True)]


def _bins(scores: torch.Tensor) -> torch.Tensor:
    logs = scores.double().clamp(min=2.0**LOWEST).log2()
    return ((logs - LOWEST) * (BINS / -LOWEST) + 1e-6).long().clamp(0, BINS - 1)


LARGEST_SEED = 2**31 - 1  # the largest seed that faiss accepts
MOST_ITERATIONS = 10_000


def check_iterations(iterations: int) -> None:
    """Raise UsageError for a number of k-means iterations below 1 or above MOST_ITERATIONS."""
    if not 1 <= iterations <= MOST_ITERATIONS:
        raise UsageError(f"--iterations {iterations}: give a number from 1 to {MOST_ITERATIONS}")


@dataclass(frozen=True)
class LayerInput:
    """Input of an indexer: one layer's middle keys and values [Hk, M, D], and facts about the layer's attention.

    The middle is the M tokens between sinks and tail.

    Args:
        queries: [Hq, P, D], a sample of the middle's queries; None unless the method's `queries_wanted` is above 0.
        positions: [P], ascending, the positions of these queries.
        sink_keys: [Hk, S, D], the keys of the sinks, before the middle.
        sink_logits: [Hq], the learned attention-sink logits of models that have them.
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
    """Input of a calibration: the tensors that a method built for a layer, and the tail's R queries [Hq, R, D].

    No method builds tensors from the tail's queries, so a calibration uses queries to which no tensor was fitted.
    """

    tensors: Tensors
    tail_queries: torch.Tensor
    facts: LayerFacts


@dataclass(frozen=True)
class Indexer(ABC):
    """Builder of one method's tensors: a frozen dataclass whose fields are its parameters and command-line options."""

    revision: ClassVar[int] = 1
    """Revision, increased when the same parameters give other tensors. Builds reuse no files of other revisions."""
    takes_tokens: ClassVar[bool] = False
    """Whether the indexer implements `append_layer`: an append adds tokens to a layer's existing tensors."""
    learns: ClassVar[bool] = False
    """Whether `append_layer` keeps codebooks or similar tensors that were learned from the earlier tokens. They may fit
    new tokens worse, and so appends build the method again at certain lengths of the text (`append.learning_again`)."""
    by_default: ClassVar[bool] = False
    """Whether the method is built if the user names no method."""
    seed: int = field(default=0, metadata={"help": "Seed of everything random in a build."})

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UsageError(f"--seed {self.seed}: give a number from 0 to {LARGEST_SEED}")

    def queries_wanted(self) -> int:
        """Return the size of the query sample that the method needs, in queries per KV head; 0 for no sample."""
        return 0

    def check_channels(self, head_dim: int) -> None:
        """Raise UsageError if the method cannot use heads of `head_dim` channels. Called before the prefill."""
        return

    @property
    def needs_rope(self) -> bool:
        """Whether the method needs the RoPE of each layer. If so, `check_rope` is called before the prefill."""
        return False

    def check_rope(self, rope: RopeFacts | None) -> None:
        """Raise UsageError if the method cannot be built for layers with this RoPE; None: the RoPE is unknown."""
        return

    def bytes_per_token(self, head_dim: int) -> float:
        """Return the method's bytes per indexed token and KV head; 0 if they are few compared with keys and values."""
        return 0.0

    @abstractmethod
    def build_layer(self, layer: LayerInput) -> Tensors:
        """Build the method's tensors for one layer, by name.

        On a CPU, several threads call `build_layer` at a time, for different layers and with gradients off.
        `build_layer` must not change shared state.
        """

    def append_layer(self, tensors: Tensors, layer: LayerInput, old_middle: int) -> Tensors:
        """Build the method's tensors for one layer after tokens were appended to the middle, the indexed tokens.

        Only indexers with `takes_tokens` implement this.

        Args:
            tensors: the tensors built for the first `old_middle` tokens of the middle, with the same parameters.
            layer: the input with the whole middle.
        """
        raise NotImplementedError

    def calibrate(self, layers: Callable[[], Iterator[BuiltLayer]]) -> dict[str, Any]:
        """Compute values that need all layers, by name; the manifest stores them.

        Each call of `layers()` iterates over all indexed layers.
        """
        return {}


indexers: Registry[type[Indexer]] = Registry("indexer", "sparsekv.indexing.methods", "sparsekv.indexers", Indexer)


def indexer_of(kind: type[Indexer], parameters: Mapping[str, Any]) -> Indexer:
    """Make an indexer from a manifest's parameters; parameters that are unknown to this version are ignored.

    Raises:
        UsageError: a parameter has an invalid value.
        TypeError, ValueError: a parameter has a value of another type.
    """
    known = {one.name for one in fields(kind)}
    return kind(**given_parameters({name: value for name, value in parameters.items() if name in known}))


def choose_indexers(names: list[str]) -> list[str]:
    """Return the names of the methods to build, each once: all for `all`, the default methods for an empty list.

    Raises:
        UsageError: a method does not exist, or is `auto`.
    """
    known = indexers()
    for name in names:
        if name == AUTO:
            raise UsageError(f"{AUTO_ELSEWHERE}; name a method that has an index: {', '.join(known)}")
        if name not in known and name != "all":
            raise UsageError(
                f"no index is built for '{name}' (methods without an index need no build); these have one: "
                f"{', '.join(known)}{suggestion(name, known)}"
            )
    if not names:
        return [name for name, indexer in known.items() if indexer.by_default]
    return list(known) if "all" in names else list(dict.fromkeys(names))
