"""Decoding with Multipole Attention and windowed RoPE (arXiv 2506.13059, section 3.1, after A2ATS, arXiv 2502.12665).

Keys are clustered with RoPE undone. The clusters are scored by a query that is rotated to one fixed distance. Attention
itself uses the true RoPE, for selected tokens and for centroids, because one softmax must not mix two rotations of the
keys.
"""

from dataclasses import dataclass, field

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.selection.clusters.steps import WindowedRope
from sparsekv.runtime.selection.interface import MiddleContext
from sparsekv.runtime.selection.registry import methods


@methods.register("multipole-windowed")
@dataclass(frozen=True)
class WindowedMultipole(Multipole):
    """Selects clusters by the centroids of keys with RoPE undone, independently of position."""

    rope_distance: int = field(
        default=1024, metadata={"help": "Clusters are scored as if their keys were this many tokens before the query."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_distance < 0:
            raise UsageError(f"--rope-distance {self.rope_distance}: give 0 or more")

    def windowed_rope(self, context: MiddleContext) -> WindowedRope:
        return WindowedRope.of_layer(context, self.rope_distance)
