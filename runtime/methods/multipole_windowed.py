"""Multipole Attention with windowed RoPE, online (arXiv 2506.13059, section 3.1, after A2ATS, arXiv 2502.12665).

Clusters of keys whose rotation was undone are scored by a query turned to one distance. What is exact, and the
centroids that stand for the rest, keep their positions: two ways to turn keys in one softmax would not be attention.
"""

from dataclasses import dataclass, field

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.selection.clusters.windowed_rope import WindowedRope
from sparsekv.runtime.selection.context import MiddleContext
from sparsekv.runtime.selection.registry import methods


@methods.register("multipole-windowed")
@dataclass(frozen=True)
class WindowedMultipole(Multipole):
    """Chooses clusters by what keys say, wherever they stand."""

    rope_distance: int = field(
        default=1024, metadata={"help": "Distance in tokens between query and keys for which clusters are scored."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_distance < 0:
            raise UsageError(f"--rope-distance {self.rope_distance}: give 0 or more")

    def windowed_rope(self, context: MiddleContext) -> WindowedRope:
        return WindowedRope.of_layer(context, self.rope_distance)
