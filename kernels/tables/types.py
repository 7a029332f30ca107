"""Ranks of keys by their lists, and the keys that are attended whatever is chosen."""

from dataclasses import dataclass

import torch

from sparsekv.kernels.clusters.types import EXPONENT_BITS, least_rank

FRACTION_BITS = 4  # of a score that its rank has: codes have rounded away more than that
BINS = 16  # that ranks are counted in, and ranks in each
RANKS = 2 ** (EXPONENT_BITS + FRACTION_BITS)
assert BINS * BINS == RANKS
LARGEST = 4095  # of a logit as a whole number: of 12 bits, four more are room for one that begins at a fourth bit


@dataclass(frozen=True)
class ExactKeys:
    """Keys [H, E, D] that are attended whatever is chosen: a head's rows are contiguous, heads need not be. `count`
    [1] int32, on their device, is how many of the rows there are; None: all."""

    keys: torch.Tensor
    count: torch.Tensor | None = None


@dataclass(frozen=True)
class TokenRanks:
    """Ranks of `keys` keys of each of H heads, 0 to 255, by how much of the attention is estimated to be theirs.

    ranks [H, tiles, 2, 512] int32, 0 past the last key: of 32 keys that follow each other the ranks are in words
    4 q to 4 q + 3 of both rows of their tile; byte j of word i of row h has that of key 8 j + 2 i + h of them.
    coarse [H, tiles, 16] int32: how many of a tile have a rank of each 16. logsumexp [H, G] float32 of the logits that
    the ranks are by and those of exact keys.
    """

    ranks: torch.Tensor
    coarse: torch.Tensor
    logsumexp: torch.Tensor
    keys: int

    def in_order(self) -> torch.Tensor:
        """[H, keys] int32."""
        bytes_of_words = self.ranks.contiguous().view(torch.uint8).unflatten(-1, (-1, 4, 4))
        by_key: torch.Tensor = bytes_of_words.permute(0, 1, 3, 5, 4, 2).flatten(1)[:, : self.keys].int()
        return by_key


def lowest_rank(wanted: int) -> int:
    """What is subtracted from a float32's leading 13 bits to make ranks of scores."""
    return least_rank(wanted, FRACTION_BITS)
