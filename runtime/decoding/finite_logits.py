"""Logits that are no numbers, told before a token is made of them: a draw from them fails, on a GPU for good."""

import torch
from transformers import LogitsProcessor

from sparsekv.formats.errors import SparsekvError


class NotFiniteError(SparsekvError):
    """A model gave logits from which no token follows."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite numbers, so there is no answer; check the index with "
            "`sparsekv inspect --verify`, and the model in --dtype float32"
        )


class FiniteLogits(LogitsProcessor):
    """Passes logits on as they are.

    Raises:
        NotFiniteError: the largest of them is no finite number.
    """

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not bool(scores.amax(-1).isfinite().all()):
            raise NotFiniteError
        return scores
