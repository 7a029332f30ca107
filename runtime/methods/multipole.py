"""Decoding with Multipole Attention (arXiv 2506.13059, section 3).

Queries attend to the tokens of the best clusters, and to the centroids of all other clusters. Without `replace`,
queries do not attend to centroids.

Each token counts once: individually, or through the centroid of its cluster. A cluster i of N_i tokens with key
centroid Kc_i and value centroid Vc_i adds N_i exp(q Kc_i) Vc_i to the numerator and N_i exp(q Kc_i) to the denominator
of one softmax. In a hierarchy, the centroid of a coarse cluster that is not opened represents all tokens of the
cluster. In an opened cluster, the children represent the tokens. RetroInfer (arXiv 2505.02922) also estimates attention
from centroids.

By default, queries attend to all new tokens exactly. With `stream`, the oldest new tokens join the clusters of the
document's last tokens from time to time (section 3.3).

With windowed RoPE (section 3.1, after A2ATS, arXiv 2502.12665) keys are clustered with RoPE undone. The clusters are
scored by a query that is rotated to one fixed distance. Attention itself uses the true RoPE, for selected tokens and
for centroids, because one softmax must not mix two rotations of the keys.
"""

from dataclasses import dataclass, field
from typing import Self

from sparsekv.formats.errors import UsageError, check_at_least_one
from sparsekv.formats.index.schema import MethodRecord
from sparsekv.runtime.selection.clusters.selector import ClusterMethod, ClusterSelector
from sparsekv.runtime.selection.clusters.steps import WindowedRope
from sparsekv.runtime.selection.clusters.stream import BlockClustering
from sparsekv.runtime.selection.interface import MiddleContext, methods


@methods.register("multipole")
@dataclass(frozen=True)
class Multipole(ClusterMethod):
    """Selects clusters of keys by their centroids; with `replace`, centroids represent the other clusters."""

    replace: bool = field(
        default=True, metadata={"help": "Attend to centroids instead of the clusters that are not selected."}
    )
    stream: bool = field(
        default=False,
        metadata={
            "appends": True,
            "help": (
                "Append generated tokens to the clusters, for long answers. One step in every --buffer steps is slow."
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
        super().__post_init__()
        check_at_least_one(self, "buffer")

    def prepare(self, context: MiddleContext) -> ClusterSelector:
        """Create the selector of a layer.

        Refers to the centroids and counts of all levels. Allocates the token order in int64, and a few numbers per
        cluster.
        """
        clustering = BlockClustering.from_parameters(context.parameters) if self.stream else None
        return ClusterSelector(
            context,
            hierarchical=self.is_hierarchical(context),
            opened=self.opened,
            replace=self.replace,
            clustering=clustering,
            append_size=self.buffer,
            windowed_rope=self.windowed_rope(context),
        )

    def windowed_rope(self, context: MiddleContext) -> WindowedRope | None:
        """Return the query rotation for clusters of keys with RoPE undone; None: the keys were clustered with RoPE."""
        return None

    def replaces(self) -> bool:
        return self.replace

    @classmethod
    def variants(cls, record: MethodRecord | None) -> dict[str, Self]:
        """Return two variants for each lookup: with and without centroids for the clusters not selected."""
        return {
            lookup if replaced else f"{lookup} without replacement": cls(lookup=lookup, replace=replaced)
            for replaced in (True, False)
            for lookup in cls.lookups(record)
        }


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
