"""KeyDiff prefill (arXiv 2504.15364): each chunk attends to the keys before it that are least like the others.

The paper evicts the rest for good; here each chunk chooses from all, so that only the choice is compared.
"""

from dataclasses import dataclass

import torch

from sparsekv.formats.schema import LayerFacts
from sparsekv.indexing.prefill.interface import SparsePrefill, prefills
from sparsekv.kernels.scores.keydiff import keydiff_scores


@prefills.register("keydiff")
@dataclass(frozen=True)
class KeyDiffPrefill(SparsePrefill):
    """Scores keys by how far they point from the mean direction; no query is looked at."""

    def scores(self, query: torch.Tensor, keys: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
        return keydiff_scores(keys)
