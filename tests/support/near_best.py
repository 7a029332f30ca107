"""Choices of the best tokens by scores that are known up to a factor: tokens that are in any, and that may be in one.

Two ways to choose that round scores differently share no fixed part of their choices: how many scores are near the last
chosen one's depends on the data. But no rounding moves a score further than the widest rank, so that both take all
tokens far above that score and none far below it.
"""

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True)
class NearBest:
    """Masks [..., M]: `sure`, the tokens that each such choice has, and `possible`, all that it may have."""

    sure: torch.Tensor
    possible: torch.Tensor

    @classmethod
    def of_all(cls, like: torch.Tensor) -> Self:
        """Every token, from which `best` chooses."""
        every = torch.ones_like(like, dtype=torch.bool)
        return cls(every, every)

    def best(self, scores: torch.Tensor, tokens: int, factor: float) -> "NearBest":
        """The `tokens` best of these by scores [..., M] above zero, of which two are in the right order only if one is
        more than `factor` times the other."""
        most, least = (scores.where(mask, 0).topk(tokens).values[..., -1:] for mask in (self.possible, self.sure))
        return NearBest(self.sure & (scores > factor * most), self.possible & (scores * factor >= least))

    def any_query(self) -> "NearBest":
        """Of masks [H, T, M], those of what any of T queries chooses, [H, M]."""
        return NearBest(self.sure.any(1), self.possible.any(1))

    def check(self, chosen: torch.Tensor) -> None:
        """Fails unless a mask [..., M] is of such a choice."""
        missed, worse = self.sure & ~chosen, chosen & ~self.possible
        assert not bool(missed.any()), f"{int(missed.sum())} of {int(self.sure.sum())} best tokens are not chosen"
        assert not bool(worse.any()), f"{int(worse.sum())} of {int(chosen.sum())} chosen tokens are not among the best"


def as_mask(tokens: torch.Tensor, number: int) -> torch.Tensor:
    """[..., number] of tokens [..., K]."""
    chosen = torch.zeros(*tokens.shape[:-1], number, dtype=torch.bool, device=tokens.device)
    return chosen.scatter_(-1, tokens.long(), True)
