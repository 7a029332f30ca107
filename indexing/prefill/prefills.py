"""The interface and registry of prefills, the dense prefill, and sparse prefills.

In a sparse prefill each chunk attends to itself and to selected earlier tokens. Every chunk and layer selects from all
earlier tokens, regardless of what earlier chunks selected: nothing is evicted for good. Sparse prefills are QuoKA
(query-oriented KV selection for chunked prefill, section 3.4 of its paper), SampleAttention (arXiv 2406.15486) and
KeyDiff (arXiv 2504.15364).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from sparsekv.formats.errors import UsageError, check_at_least_one, check_choice
from sparsekv.formats.index.schema import LayerFacts, QuokaOptions
from sparsekv.formats.registry import Registry
from sparsekv.kernels.attention.attention import causal_attention, chunk_attention, sampled_attention, spaced_places
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.kernels.scores.logits import keydiff_scores
from sparsekv.kernels.scores.quoka import (
    best_keys,
    directions,
    far_directions,
    nearest_keys,
    quoka_scores,
    subselect_queries,
)


@dataclass(frozen=True)
class Prefill(ABC):
    """One way to prefill: a frozen dataclass whose fields are its parameters and command-line options."""

    exact: ClassVar[bool] = False
    """Whether attention is dense, so that the chunk size does not change the result."""
    revision: ClassVar[int] = 1
    """Increased when the same parameters give other rows than before. Builds reuse no rows of another revision."""

    @abstractmethod
    def attend(self, call: AttentionCall, sinks: int) -> torch.Tensor:
        """Compute the attention output [Hq, B, D] of one chunk, whose tokens are the last of the keys.

        Args:
            sinks: number of first tokens that are always attended.
        """


prefills: Registry[type[Prefill]] = Registry("way to prefill", "sparsekv.indexing.prefill")


def prefill_name(prefill: Prefill) -> str:
    """Return the name under which a prefill was registered."""
    return next(name for name, known in prefills.known.items() if known is type(prefill))


def choose_prefill(name: str) -> type[Prefill]:
    """Return a prefill's class by its name. Raises UsageError for an unknown name."""
    check_choice("--prefill", name, prefills())
    return prefills()[name]


@prefills.register("dense")
@dataclass(frozen=True)
class DensePrefill(Prefill):
    """Every token attends to itself and to all earlier tokens, or to those within the layer's sliding window."""

    exact: ClassVar[bool] = True

    def attend(self, call: AttentionCall, sinks: int) -> torch.Tensor:
        return causal_attention(
            call.query, call.keys, call.values, call.softmax_scale, call.softcap, call.window, call.sink_logits
        )


@dataclass(frozen=True)
class SparsePrefill(Prefill):
    """A chunk attends to itself and to `prefill_budget` earlier tokens: sinks, recent tokens, and the best by score.

    `prefill_recent` is the share of the budget that is reserved for recent tokens, the last before the chunk. The
    papers reserve none. But then the first queries of a chunk may not attend to the text that they continue.
    """

    # In revision 1, a build could reuse rows of an earlier index although its sinks or chunks were different.
    revision: ClassVar[int] = 2
    prefill_budget: int = field(default=1024, metadata={"help": "How many earlier tokens a chunk attends to."})
    prefill_recent: float = field(
        default=0.125,
        metadata={
            "help": "Share of --prefill-budget that is reserved for the tokens just before the chunk, whatever their "
            "score."
        },
    )

    def __post_init__(self) -> None:
        check_at_least_one(self, "prefill_budget")
        if not 0 <= self.prefill_recent <= 1:
            raise UsageError(f"--prefill-recent {self.prefill_recent:g}: give a share from 0 to 1")

    @abstractmethod
    def scores(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
        """Compute scores [Hk, T] of the keys [Hk, T, D] before a chunk, for the chunk's queries [Hk, G, B, D].

        Keys with higher scores are selected first.
        """

    def choose(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts, first: int, last: int) -> torch.Tensor:
        """Select the keys [Hk, T, D] before a chunk that its queries [Hk, G, B, D] attend to: indices [Hk, K] int64.

        Args:
            first, last: numbers of first and last keys that are selected regardless of their scores.
        """
        return best_keys(self.scores(query, keys, facts), self.prefill_budget, first, last)

    def attend(self, call: AttentionCall, sinks: int) -> torch.Tensor:
        """Attend to the selected rows and the chunk's rows, which are copied.

        Attention is dense in layers with a sliding window, and if at most `prefill_budget` tokens are before the chunk.
        """
        before = call.keys.shape[1] - call.query.shape[1]
        if call.window is not None or before <= self.prefill_budget:
            return DensePrefill().attend(call, sinks)
        facts = LayerFacts(
            softmax_scale=call.softmax_scale,
            softcap=call.softcap,
            sliding_window=None,
            attention_sinks=call.sink_logits is not None,
        )
        recent = int(self.prefill_recent * self.prefill_budget)
        first = min(sinks, self.prefill_budget - recent)
        rows = self.choose(call.grouped, call.keys[:, :before], facts, first, recent)
        return chunk_attention(
            call.query, call.keys, call.values, rows, call.softmax_scale, call.softcap, call.sink_logits
        )


@prefills.register("sampleattention")
@dataclass(frozen=True)
class SampleAttentionPrefill(SparsePrefill):
    """Scores keys by the attention that evenly spaced queries of the chunk pay to them."""

    prefill_queries: int = field(
        default=16, metadata={"help": "How many of a chunk's queries rank the tokens that the whole chunk attends to."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "prefill_queries")

    def scores(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
        some = query[:, :, spaced_places(query.shape[2], self.prefill_queries).to(query.device)]
        return sampled_attention(some, keys, *facts.scaling)


@prefills.register("keydiff")
@dataclass(frozen=True)
class KeyDiffPrefill(SparsePrefill):
    """Scores keys by their negative cosine with the mean key direction, independently of the queries."""

    def scores(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
        return keydiff_scores(keys)


@prefills.register("quoka")
@dataclass(frozen=True)
class QuokaPrefill(QuokaOptions, SparsePrefill):
    """Scores keys by their similarity to some of the chunk's queries, by default by the cosine to a few queries.

    For the cosine, kernels on a GPU select the keys without storing scores.
    """

    def __post_init__(self) -> None:
        SparsePrefill.__post_init__(self)
        QuokaOptions.__post_init__(self)

    def choose(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts, first: int, last: int) -> torch.Tensor:
        if self.quoka_similarity != "cosine":
            return super().choose(query, keys, facts, first, last)
        if self.quoka_subset == "far":
            some = far_directions(query, self.prefill_queries)
        else:
            some = directions(subselect_queries(query, self.prefill_queries, self.quoka_subset, seed=keys.shape[1]))
        some = some.mean(1, keepdim=True) if self.quoka_across == "mean" else some
        return nearest_keys(some, keys, self.prefill_budget, first, last)

    def scores(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
        some = subselect_queries(query, self.prefill_queries, self.quoka_subset, seed=keys.shape[1])
        return quoka_scores(some, keys, similarity=self.quoka_similarity, across=self.quoka_across)[:, 0]
