"""Indexer of H2O (arXiv 2306.14048): the attention of the document's own queries to each middle token.

The attention is summed over a sample of the document's queries. A query's softmax is over the sinks, the middle tokens
up to the query's own token, and learned sink logits if the layer has them. As in the paper, the sum favours early
tokens, because more queries can attend to early tokens.
"""

from dataclasses import dataclass, field

import torch

from sparsekv.formats.errors import check_at_least_one
from sparsekv.indexing.indexers.interface import Indexer, LayerInput, Tensors, indexers
from sparsekv.kernels.scores.logits import attention_logits

LOGITS_AT_ONCE = 16 * 2**20  # elements of [Hq, P, S + M] float32 logits: 64 MB


@indexers.register("h2o")
@dataclass(frozen=True)
class H2OIndexer(Indexer):
    """Sums the attention of a sample of the document's queries to each middle token. Not built by default."""

    query_sample: int = field(
        default=4096, metadata={"help": "Number of the document's queries, per KV head, whose attention is summed."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "query_sample")

    def queries_wanted(self) -> int:
        return self.query_sample

    def build_layer(self, layer: LayerInput) -> Tensors:
        """Build scores [Hk, M] float32: attention summed over the sampled queries and averaged over the query heads.

        Works on parts of the queries, with a few arrays of 64 MB at a time.
        """
        assert layer.queries is not None
        assert layer.positions is not None
        assert layer.sink_keys is not None
        keys = torch.cat([layer.sink_keys, layer.keys], 1)
        scores = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
        step = max(1, LOGITS_AT_ONCE // (len(layer.queries) * keys.shape[1]))
        for queries, positions in zip(layer.queries.split(step, 1), layer.positions.split(step), strict=True):
            scores += self._attention(layer, keys, queries.unflatten(0, (len(keys), -1)), positions)
        return {"scores": scores[:, layer.split.sinks :].contiguous()}

    def _attention(
        self, layer: LayerInput, keys: torch.Tensor, queries: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Compute attention [Hk, S + M] to keys [Hk, S + M, D], summed over positions and averaged over query heads.

        Args:
            queries: [Hk, G, P, D], the queries at `positions` [P].
        """
        logits = attention_logits(queries, keys, *layer.facts.scaling)
        unseen = torch.arange(keys.shape[1], device=keys.device) > positions[:, None]
        logits = logits.masked_fill(unseen, -torch.inf)
        total = logits.logsumexp(-1, keepdim=True)
        if layer.sink_logits is not None:
            total = torch.logaddexp(total, layer.sink_logits.float().view(len(keys), -1, 1, 1))
        return (logits - total).exp().sum(2).mean(1)
