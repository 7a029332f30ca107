"""Choices of the best tokens by scores that are known up to a factor.

Two implementations that round scores differently may share any part of their choices, because it depends on the data
how many scores are near that of the last chosen token. But no rounding moves a score further than the widest rank. So
both choose all tokens that score far above the last chosen token, and none that scores far below it.
"""

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True)
class NearBest:
    """Masks [..., M]: `sure`, the tokens that every valid choice has, and `possible`, the tokens that any may have."""

    sure: torch.Tensor
    possible: torch.Tensor

    @classmethod
    def of_all(cls, like: torch.Tensor) -> Self:
        """Return masks of all tokens, from which `best` chooses."""
        every = torch.ones_like(like, dtype=torch.bool)
        return cls(every, every)

    def best(self, scores: torch.Tensor, tokens: int, factor: float) -> "NearBest":
        """Return masks of the `tokens` best of these tokens, by scores [..., M] above zero.

        The order of two scores is certain only if one is more than `factor` times the other.
        """
        most, least = (scores.where(mask, 0).topk(tokens).values[..., -1:] for mask in (self.possible, self.sure))
        return NearBest(self.sure & (scores > factor * most), self.possible & (scores * factor >= least))

    def any_query(self) -> "NearBest":
        """Return the masks [H, M] of the tokens that any of T queries chooses, from masks [H, T, M]."""
        return NearBest(self.sure.any(1), self.possible.any(1))

    def check(self, chosen: torch.Tensor) -> None:
        """Fail unless the mask `chosen` [..., M] is a valid choice."""
        missed, worse = self.sure & ~chosen, chosen & ~self.possible
        assert not bool(missed.any()), f"{int(missed.sum())} of {int(self.sure.sum())} best tokens are not chosen"
        assert not bool(worse.any()), f"{int(worse.sum())} of {int(chosen.sum())} chosen tokens are not among the best"


def as_mask(tokens: torch.Tensor, number: int) -> torch.Tensor:
    """Return the mask [..., number] of tokens [..., K]."""
    chosen = torch.zeros(*tokens.shape[:-1], number, dtype=torch.bool, device=tokens.device)
    return chosen.scatter_(-1, tokens.long(), True)
