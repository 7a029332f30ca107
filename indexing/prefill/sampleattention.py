"""SampleAttention prefill (arXiv 2406.15486): a chunk attends to the tokens that a few of its queries attend to most.

The paper selects tokens until they have a given share of the sampled attention; here their number is fixed, as in the
comparison of QuoKA's paper.
"""

from dataclasses import dataclass, field

import torch

from sparsekv.formats.quoka import check_prefill_queries
from sparsekv.formats.schema import LayerFacts
from sparsekv.indexing.prefill.interface import SparsePrefill, prefills
from sparsekv.kernels.attention.sampled_attention import sampled_attention, spaced_places


@prefills.register("sampleattention")
@dataclass(frozen=True)
class SampleAttentionPrefill(SparsePrefill):
    """Scores keys by the attention of evenly spaced queries of the chunk."""

    prefill_queries: int = field(
        default=16, metadata={"help": "How many of a chunk's queries rank the tokens that the whole chunk attends to."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_prefill_queries(self.prefill_queries)

    def scores(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
        some = query[:, :, spaced_places(query.shape[2], self.prefill_queries).to(query.device)]
        return sampled_attention(some, keys, facts.softmax_scale, facts.softcap)
