"""KeyDiff prefill (arXiv 2504.15364): each chunk attends to the earlier keys that are least similar to their mean.

The paper evicts the other keys for good; here each chunk selects from all, so that only the selection is compared.
"""

from dataclasses import dataclass

import torch

from sparsekv.formats.schema import LayerFacts
from sparsekv.indexing.prefill.interface import SparsePrefill, prefills
from sparsekv.kernels.scores.keydiff import keydiff_scores


@prefills.register("keydiff")
@dataclass(frozen=True)
class KeyDiffPrefill(SparsePrefill):
    """Scores keys by minus their cosine to the mean key direction, without queries."""

    def scores(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
        return keydiff_scores(keys)
