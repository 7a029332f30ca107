"""Decoding with CSAttention: keys are selected through posting lists, one for each centroid of the prompt's queries.

In each subspace, the query reads the posting list of its nearest centroid. The listed scores, summed for each key,
estimate the logits, and the best keys are attended to.

There are three differences from the paper by default. In the paper, a key that is not in a list scores 0 in the list's
subspace, which is more than a listed key with a negative score. Here it gets the mean score of all keys that are not
in the list. Each subspace's scores are multiplied by the query's projection on the centroid. The keys of more
candidates than the budget are read, and re-ranked by exact logits.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

from sparsekv.formats.errors import UsageError, check_at_least_one, check_choice
from sparsekv.formats.index.schema import MethodRecord
from sparsekv.kernels.posting_lists.posting_lists import SCORINGS
from sparsekv.runtime.selection.cluster_statistics import ListShape, describe_lists
from sparsekv.runtime.selection.interface import Method, MiddleContext
from sparsekv.runtime.selection.posting_lists import TableSelector
from sparsekv.runtime.selection.registry import methods
from sparsekv.runtime.selection.token_choice import check_rerank

WEIGHTS = ("uniform", "fitted")


@methods.register("csattention")
@dataclass(frozen=True)
class CSAttention(Method):
    """Selects tokens by the posting lists of the query's nearest centroids."""

    needs_index: ClassVar[bool] = True
    learns_queries: ClassVar[bool] = True
    searched_on_host: ClassVar[bool] = True
    csattention_scoring: str = field(
        default="mean",
        metadata={
            "help": f"Score of the keys that a posting list leaves out: {', '.join(SCORINGS)}. mean is the mean of "
            "these keys' scores, floor the list's lowest score, paper 0."
        },
    )
    rerank: float = field(
        default=2.0,
        metadata={"help": "Rank this many times the budget's keys by exact logits, and attend to the best; 1: off."},
    )
    csattention_weights: str = field(
        default="uniform",
        metadata={"help": f"Weights of the subspaces' scores: {', '.join(WEIGHTS)} (in the build, by least squares)."},
    )
    backoff: float = field(
        default=0.0,
        metadata={"help": "Share of lookups, those of lowest cosine to their centroid, that read two posting lists."},
    )
    step: int = field(default=1, metadata={"help": "Number of consecutive generated tokens that share one selection."})
    stream: bool = field(
        default=False,
        metadata={
            "appends": True,
            "help": (
                "Append generated tokens to the index's posting lists or clusters. For long answers. With "
                "clusters, one step in every --buffer steps is slow."
            ),
        },
    )
    buffer: int = field(
        default=128,
        metadata={
            "needs": {"stream": True},
            "help": (
                "With --stream, number of generated tokens that are appended together. Up to twice as many wait "
                "until then, and all of them are attended to."
            ),
        },
    )

    def __post_init__(self) -> None:
        check_choice("--csattention-scoring", self.csattention_scoring, SCORINGS)
        check_choice("--csattention-weights", self.csattention_weights, WEIGHTS)
        check_rerank(self.rerank)
        if not 0 <= self.backoff <= 1:
            raise UsageError(f"--backoff {self.backoff:g}: give a share from 0 to 1")
        check_at_least_one(self, "step", "buffer")

    def prepare(self, context: MiddleContext) -> TableSelector:
        """Create the selector of a layer. Loads the keys, and allocates the centroids in float32.

        The posting lists are not copied. Each append allocates new lists, and the first append also copies the keys. On
        a GPU, posting lists over 16,384 keys or more are also stored by token, unless appending or backoff is on. The
        layout by token takes half a byte per list and key of the middle.
        """
        return TableSelector(
            context,
            scoring=self.csattention_scoring,
            rerank=self.rerank,
            fitted=self.csattention_weights == "fitted",
            backoff=_backoff_cosine(context.calibration, self.backoff),
            step=self.step,
            append_size=self.buffer if self.stream else 0,
        )

    def cycle(self) -> int:
        return self.step

    @classmethod
    def variants(cls, record: MethodRecord | None) -> dict[str, Self]:
        """Return the default variant, and variants without re-ranking: one per scoring, and one with fitted weights."""
        plain = {scoring: cls(csattention_scoring=scoring, rerank=1.0) for scoring in SCORINGS}
        return {"reranked": cls(), **plain, "mean fitted": cls(rerank=1.0, csattention_weights="fitted")}

    @classmethod
    def describe_lists(cls, context: MiddleContext, queries: torch.Tensor) -> ListShape:
        return describe_lists(context.tensors, context.keys, queries, context.first_token)


def _backoff_cosine(calibration: dict[str, Any], share: float) -> float | None:
    """Return the cosine below which `share` of the calibration lookups are; None for a share of 0."""
    if not share:
        return None
    cosines = calibration["cosines"]
    place = share * (len(cosines) - 1)
    low = int(place)
    high = min(low + 1, len(cosines) - 1)
    return float(cosines[low] + (place - low) * (cosines[high] - cosines[low]))
