"""Indexer of the method `codes`: codes of all indexed keys, and clusters that represent the tokens not selected.

Keys are encoded by product quantisation, as in PQCache (arXiv 2407.12820). Before the quantisation, keys are multiplied
by a matrix, so that quantisation errors change the logits of the document's queries least. The more these queries
attend to a key, the more its quantisation error counts. The clusters are those of Multipole (arXiv 2506.13059). The
attention mass and the value of a cluster are fitted to the document's queries.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from sparsekv.formats.errors import UsageError, check_at_least_one
from sparsekv.indexing.indexers.cluster_indexer import ClusterIndexer, finest_labels
from sparsekv.indexing.indexers.interface import LayerInput, Tensors, indexers
from sparsekv.indexing.indexers.product_codes import (
    CODES,
    attended,
    check_parts,
    decode,
    encode,
    fit_rest,
    key_turn,
    query_turn,
    train_codebooks,
)
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.kernels.scores.logits import attention_logits

ATTENDED_EVERY, FIT_EVERY = 2, 6
"""Strides over the sample's positions, for the keys' weights and for the fit of the clusters. With smaller strides, the
output error of reports changes by less than 1% of itself, and a build on a CPU takes longer."""
WIDE = 128
"""Largest number of channels of heads whose codes always have `code_bytes` bytes. Codes of larger heads have twice as
many bytes, if these divide the channels: with 8 bytes for 256 channels, Gemma 3 loses facts."""
FLOOR = 0.3
"""Share of a head's mean attention weight (`attended`) that is added to the weight of each key, so that keys that none
of the document's queries attends to also count."""


@indexers.register("codes")
@dataclass(frozen=True)
class CodesIndexer(MultipoleIndexer):
    """Builds codes of the keys of all tokens between sinks and tail, and one cluster per 128 tokens.

    The attention mass and the value of each cluster are fitted to the document's queries.
    """

    by_default: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    revision: ClassVar[int] = 4
    levels: tuple[float, ...] = field(
        default=(0.0078125,), metadata={"help": ClusterIndexer.__dataclass_fields__["levels"].metadata["help"]}
    )
    iterations: int = field(
        default=4, metadata={"help": ClusterIndexer.__dataclass_fields__["iterations"].metadata["help"]}
    )
    code_bytes: int = field(
        default=8,
        metadata={
            "help": "Bytes of a key's code, a divisor of the head's channels. Heads of more than 128 channels have "
            "twice as many, if these divide the channels too."
        },
    )
    query_sample: int = field(
        default=1536, metadata={"help": "Number of the document's queries, per KV head, to build from."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.levels) > 1:
            shares = ",".join(map(str, self.levels))
            raise UsageError(
                f"--levels {shares}: codes has one level; give one share, or build codes by another command"
            )
        check_at_least_one(self, "code_bytes", "query_sample")

    def queries_wanted(self) -> int:
        return self.query_sample

    def check_channels(self, head_dim: int) -> None:
        check_parts("--code-bytes", self.code_bytes, head_dim)

    def _parts(self, head_dim: int) -> int:
        """Return the number of bytes of a key's code, each of which stands for a part of the channels."""
        twice = 2 * self.code_bytes
        return twice if head_dim > WIDE and head_dim % twice == 0 else self.code_bytes

    def build_layer(self, layer: LayerInput) -> Tensors:
        """Build the clusters' tensors, the codes, and the clusters' fitted masses and values.

        The result has the tensors of C clusters, query_turn [Hk, D, D] and codebooks [Hk, m, 256 or fewer, D / m]
        float16, codes [Hk, M, m] uint8, rest_bias [Hk, C] float32 and rest_values [Hk, C, D]. Allocates the keys four
        times in float32.
        """
        clusters = super().build_layer(layer)
        return clusters | self._coded_and_rest(layer, clusters)

    def append_layer(self, tensors: Tensors, layer: LayerInput, old_middle: int) -> Tensors:
        """Append tokens to the clusters, encode the new keys, and fit the clusters' masses and values again.

        The stored query_turn and codebooks encode the new keys, and stay as they are. Codebooks that were trained on
        fewer than 256 keys are trained again, because they distinguish few keys.
        """
        clusters = super().append_layer(tensors, layer, old_middle)
        if tensors["codebooks"].shape[2] < min(CODES, layer.keys.shape[1]):
            return clusters | self._coded_and_rest(layer, clusters)
        kept = {name: tensors[name] for name in ("query_turn", "codebooks")}
        new = layer.keys[:, old_middle:].float() @ key_turn(kept["query_turn"])
        coded = kept | {"codes": torch.cat([tensors["codes"], encode(new, kept["codebooks"])], 1)}
        return clusters | coded | _rest(layer, clusters, coded)

    def _coded_and_rest(self, layer: LayerInput, clusters: Tensors) -> Tensors:
        matter = attended(layer.keys, _grouped(layer)[:, :, ::ATTENDED_EVERY], layer.facts)
        weights = matter + FLOOR * matter.mean(1, keepdim=True)
        parts = self._parts(layer.keys.shape[2])
        turn = query_turn(layer.keys, _grouped(layer).flatten(1, 2), parts, weights)
        rotated = layer.keys.float() @ key_turn(turn)
        codebooks = train_codebooks(rotated, parts, self.iterations, self.seed, weights)
        coded = {"query_turn": turn, "codebooks": codebooks, "codes": encode(rotated, codebooks)}
        return coded | _rest(layer, clusters, coded)


def _grouped(layer: LayerInput) -> torch.Tensor:
    """Reshape the sample's queries to [Hk, G, P, D]."""
    assert layer.queries is not None
    grouped: torch.Tensor = layer.queries.unflatten(0, (len(layer.keys), -1))
    return grouped


def _rest(layer: LayerInput, clusters: Tensors, coded: Tensors) -> Tensors:
    """Fit rest_bias and rest_values for the tokens that the document's queries do not select by the tokens' codes."""
    labels, some = finest_labels(clusters), _grouped(layer)[:, :, ::FIT_EVERY]
    turn, named = coded["query_turn"].float()[:, None], decode(coded["codes"], coded["codebooks"])

    def by_codes(queries: torch.Tensor) -> torch.Tensor:
        return attention_logits(queries.float() @ turn, named, *layer.facts.scaling)

    return fit_rest(layer.keys, layer.values, some, by_codes, clusters, labels, layer.facts)
