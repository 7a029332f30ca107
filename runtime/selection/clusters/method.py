"""The base class of the methods that choose clusters: the lookup options, and the statistics shown to the user."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.schema import MethodRecord
from sparsekv.formats.suggestions import choose_one
from sparsekv.runtime.selection.cluster_statistics import Clustering, describe_clusters
from sparsekv.runtime.selection.clusters.selector import OPENED
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.interface import Method

LOOKUPS = ("flat", "hierarchical")


@dataclass(frozen=True)
class ClusterMethod(Method):
    """Scores clusters flat (all of the finest level) or hierarchically (down the levels of the index)."""

    needs_index: ClassVar[bool] = True
    estimates_missed: ClassVar[bool] = True
    lookup: str = field(
        default="flat",
        metadata={
            "help": f"Which clusters are scored: all of the finest level, or level by level: {', '.join(LOOKUPS)}."
        },
    )
    opened: float = field(
        default=OPENED,
        kw_only=True,
        metadata={
            "help": "With --lookup hierarchical, the share of a finer level's clusters that is scored, as a multiple "
            "of the budget's share: 4 at a budget of 5% scores 20%. At most half, halved again per further level."
        },
    )

    def __post_init__(self) -> None:
        if self.lookup not in LOOKUPS:
            raise UsageError(f"--lookup {self.lookup}: {choose_one(self.lookup, LOOKUPS)}")
        if not self.opened > 0:
            raise UsageError(f"--opened {self.opened:g}: give a number above 0, such as {OPENED:g}")

    def is_hierarchical(self, context: MiddleContext) -> bool:
        """Whether the lookup is hierarchical; UsageError when it is and the index has only one level."""
        if self.lookup == "hierarchical" and "level1.centroids" not in context.tensors:
            raise UsageError("this index has one level; build it with two, such as --levels 0.05,0.01")
        return self.lookup == "hierarchical"

    @classmethod
    def lookups(cls, record: MethodRecord | None) -> tuple[str, ...]:
        """The lookups that an index supports: hierarchical only if it has several levels."""
        levels = () if record is None else record.parameters.get("levels")
        return LOOKUPS if isinstance(levels, Sequence) and len(levels) > 1 else LOOKUPS[:1]

    @classmethod
    def describe_clusters(cls, context: MiddleContext, values: torch.Tensor, biggest: int) -> Clustering:
        return describe_clusters(context.tensors, context.keys, values, context.first_token, biggest)
