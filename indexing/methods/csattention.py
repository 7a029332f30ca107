"""Indexer of CSAttention: posting lists of keys, one list for each centroid of the document's queries in a subspace.

For each KV head, the queries of the whole group are clustered by cosine in each subspace, from k-means++ seeds. A
centroid's posting list holds L of the middle's keys, those of highest score. The middle is the document's tokens
between sinks and tail, and L is the share `--alpha` of their number. A key's score is the product of the centroid and
the key's channels in the subspace. Scores are computed with the stored centroids, which are in float16.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from sparsekv.formats.errors import UsageError, check_at_least_one, check_choice
from sparsekv.formats.index.schema import RopeFacts
from sparsekv.indexing.indexers.interface import BuiltLayer, Indexer, LayerInput, Tensors, check_iterations, indexers
from sparsekv.kernels.posting_lists.posting_lists import (
    Tables,
    cosine_kmeans,
    cosines,
    fit_weights,
    rope_pair_order,
    split_channels,
    top_lists,
)

SUBSPACES = ("rope-pairs", "contiguous")
ENTRY_BYTES = 6  # int32 position, float16 score
FITTED_POSITIONS = 32  # number of the sample's last positions, to whose queries the subspaces' weights are fitted
QUANTILES = 101


@indexers.register("csattention")
@dataclass(frozen=True)
class CSAttentionIndexer(Indexer):
    """Builds query-centric posting lists; not by default, because they are larger than keys and values."""

    learns: ClassVar[bool] = True
    takes_tokens: ClassVar[bool] = True
    subspace_size: int = field(
        default=16, metadata={"help": "Channels per subspace, a divisor of the head's channels."}
    )
    subspaces: str = field(
        default="rope-pairs", metadata={"help": f"Which channels form a subspace: {', '.join(SUBSPACES)} (neighbours)."}
    )
    query_sample: int = field(
        default=4096,
        metadata={"help": "Number of the document's queries, per KV head, to build from; at most 65536."},
    )
    centroids: int = field(default=128, metadata={"help": "Number of centroids of queries in each subspace."})
    alpha: float = field(
        default=0.25, metadata={"help": "Length of a centroid's posting list, as a share of the document's keys."}
    )
    iterations: int = field(default=10, metadata={"help": "Iterations of k-means."})
    largest_sample: ClassVar[int] = 65_536

    def __post_init__(self) -> None:
        super().__post_init__()
        check_iterations(self.iterations)
        check_at_least_one(self, "subspace_size", "centroids", "query_sample")
        if self.query_sample > self.largest_sample:
            raise UsageError(f"--query-sample {self.query_sample}: give at most {self.largest_sample}")
        if not 0 < self.alpha <= 1:
            raise UsageError(f"--alpha {self.alpha:g}: give a share above 0 and at most 1")
        check_choice("--subspaces", self.subspaces, SUBSPACES)

    def queries_wanted(self) -> int:
        return self.query_sample

    def bytes_per_token(self, head_dim: int) -> float:
        return ENTRY_BYTES * head_dim / self.subspace_size * self.centroids * self.alpha

    def build_layer(self, layer: LayerInput) -> Tensors:
        """Build channels [m, D / m] int32, centroids [Hk, m, C, D / m] float16, and the tensors of `_with_lists`.

        m is the number of subspaces. C is the option `--centroids`, or the number of queries if that is smaller.
        Allocates queries and keys in float32, one subspace's scores [C, M] at a time, and a few tensors [m, R, M] of
        one head, for the R queries at FITTED_POSITIONS positions to which the subspaces' weights are fitted.

        Raises:
            UsageError: a head does not divide into subspaces, or the layer's RoPE pairs are unknown or would be split.
        """
        assert layer.queries is not None
        channels = self._channels(layer).to(layer.keys.device)
        queries = split_channels(layer.queries.unflatten(0, (len(layer.keys), -1)).flatten(1, 2), channels)
        generator = torch.Generator(queries.device).manual_seed(self.seed)
        clusters = min(self.centroids, queries.shape[2])
        centroids = cosine_kmeans(queries.flatten(0, 1), clusters, self.iterations, generator)
        kept = {"channels": channels.int(), "centroids": centroids.unflatten(0, queries.shape[:2]).half()}
        return self._with_lists(kept, layer)

    def append_layer(self, tensors: Tensors, layer: LayerInput, old_middle: int) -> Tensors:
        """Keep the centroids, and build their lists over all keys. Allocates like `build_layer`, but no queries."""
        return self._with_lists({name: tensors[name] for name in ("channels", "centroids")}, layer)

    def _with_lists(self, kept: Tensors, layer: LayerInput) -> Tensors:
        """Add the posting lists, the mean key and the subspaces' weights to the tensors.

        The lists are table_tokens [Hk, m, C, L] int32, ascending along a list, and table_scores [Hk, m, C, L] float16.
        key_mean [Hk, m, D / m] float32 is the mean of all middle keys, and part_weights is [Hk, m] float32.
        """
        assert layer.queries is not None
        keys = split_channels(layer.keys, kept["channels"])
        length = max(1, round(self.alpha * keys.shape[2]))
        positions, scores = top_lists(kept["centroids"].float(), keys, length)
        lists = {"table_tokens": positions + layer.split.sinks, "table_scores": scores, "key_mean": keys.mean(2)}
        tables = Tables.from_tensors(kept | lists, keys.shape[2], layer.split.sinks)
        last = layer.queries[:, -FITTED_POSITIONS:].unflatten(0, (len(keys), -1)).flatten(1, 2)
        return kept | lists | {"part_weights": fit_weights(tables, last, layer.keys, layer.facts.softmax_scale)}

    def calibrate(self, layers: Callable[[], Iterator[BuiltLayer]]) -> dict[str, Any]:
        """Compute `cosines`: percentiles 0 to 100 of the cosine between a query in a subspace and its nearest centroid.

        The percentiles are over all layers, heads, subspaces, and the first half of the tail's queries, from which no
        centroid was made. The cosine threshold of `--backoff` is one of these percentiles.
        """
        found = []
        for layer in layers():
            tables = Tables.from_tensors(layer.tensors, 0, 0)
            queries = layer.tail_queries[:, : layer.tail_queries.shape[1] // 2]
            grouped = queries.unflatten(0, (len(tables.centroids), -1)).flatten(1, 2)
            found.append(cosines(tables, grouped).amax(-1).flatten().cpu())
        ordered = torch.cat(found).sort().values
        places = torch.linspace(0, len(ordered) - 1, QUANTILES).round().long()
        return {"cosines": ordered[places].tolist()}

    def check_channels(self, head_dim: int) -> None:
        if head_dim % self.subspace_size:
            raise UsageError(
                f"--subspace-size {self.subspace_size}: the model's heads have {head_dim} channels; give a divisor of "
                f"{head_dim}"
            )

    @property
    def needs_rope(self) -> bool:
        return self.subspaces == "rope-pairs"

    def check_rope(self, rope: RopeFacts | None) -> None:
        if rope is None:
            raise UsageError(
                "--subspaces rope-pairs: how this model rotates its keys could not be determined; give "
                "--subspaces contiguous"
            )
        if rope.frequencies and self.subspace_size % 2:
            raise UsageError(
                f"--subspace-size {self.subspace_size} splits pairs of channels that RoPE rotates together; give an "
                "even size, or --subspaces contiguous"
            )

    def _channels(self, layer: LayerInput) -> torch.Tensor:
        head_dim, rope = layer.keys.shape[2], layer.facts.rope
        self.check_channels(head_dim)
        if not self.needs_rope:
            return torch.arange(head_dim).view(-1, self.subspace_size)
        self.check_rope(rope)
        assert rope is not None
        order = rope_pair_order(head_dim, len(rope.frequencies), interleaved=rope.interleaved)
        return order.view(-1, self.subspace_size)
