"""Decoding with Squeezed Attention (arXiv 2411.09688).

Centroids are looked up flat (section 3.2) or hierarchically (section 3.3).

Clusters are selected by their score S_i, the estimated attention probability of one token of cluster i, averaged over
the group. With `selection=budget`, the best clusters are selected up to the budget, the last of them in part. With
`selection=threshold`, all clusters whose score reaches a threshold are selected. All layers and heads have the same
threshold, which is calibrated so that the mean share of selected tokens is the budget. Heads with flat attention select
more tokens. A hierarchical lookup has one more threshold for each coarse level.
"""

from dataclasses import dataclass, field
from typing import Self

from sparsekv.formats.errors import check_choice
from sparsekv.formats.index.schema import MethodRecord
from sparsekv.runtime.selection.clusters.selector import ClusterMethod, ClusterSelector
from sparsekv.runtime.selection.clusters.steps import Thresholds
from sparsekv.runtime.selection.interface import MiddleContext, methods

SELECTIONS = ("budget", "threshold")


@methods.register("squeezed")
@dataclass(frozen=True)
class Squeezed(ClusterMethod):
    """Selects clusters of keys by their centroids."""

    selection: str = field(
        default="budget",
        metadata={"help": f"How clusters are selected: {', '.join(SELECTIONS)} (one score threshold for all heads)."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("--selection", self.selection, SELECTIONS)

    def prepare(self, context: MiddleContext) -> ClusterSelector:
        """Create the selector of a layer.

        Refers to the centroids and counts of all levels. Allocates the token order in int64, and a few numbers per
        cluster.
        """
        hierarchical = self.is_hierarchical(context)
        thresholds = Thresholds(context.calibration, self.lookup) if self.selection == "threshold" else None
        return ClusterSelector(context, hierarchical=hierarchical, opened=self.opened, thresholds=thresholds)

    @classmethod
    def variants(cls, record: MethodRecord | None) -> dict[str, Self]:
        """Return two variants for each lookup: with selection by budget and by threshold."""
        return {
            lookup if selection == "budget" else f"{lookup} {selection}": cls(lookup=lookup, selection=selection)
            for selection in SELECTIONS
            for lookup in cls.lookups(record)
        }
