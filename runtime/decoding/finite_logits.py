"""Rejects logits that are not finite before a token is sampled: on a GPU, sampling from them breaks CUDA for good."""

import torch
from transformers import LogitsProcessor

from sparsekv.formats.errors import SparsekvError


class NotFiniteError(SparsekvError):
    """A model's logits are not finite, so that no token can be chosen."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite numbers, so there is no answer; check the index with inspect --verify, "
            "and the model in --dtype float32"
        )


class FiniteLogits(LogitsProcessor):
    """Returns logits unchanged.

    Raises:
        NotFiniteError: the largest logit of a sequence is not finite.
    """

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not bool(scores.amax(-1).isfinite().all()):
            raise NotFiniteError
        return scores
