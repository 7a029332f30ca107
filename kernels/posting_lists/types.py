"""Ranks of keys by their posting lists, and keys that are always attended."""

from dataclasses import dataclass

import torch

from sparsekv.kernels.clusters.types import EXPONENT_BITS, least_rank

FRACTION_BITS = 4  # of a score that its rank keeps: the rounding of codes loses more than the bits below
BINS = 16  # coarse bins of ranks, and ranks in each
RANKS = 2 ** (EXPONENT_BITS + FRACTION_BITS)
assert BINS * BINS == RANKS
# Where each rank is counted by itself there are fewer: half an octave each, and an eighth in the 85 of 256 where the
# last chosen key's is nearly always.
FEW_RANKS, FINE_FROM, FINE = 64, 130, 85
LARGEST = 4095  # integer sum of codes: 12 bits, so that one shifted up by four bits fits in 16


@dataclass(frozen=True)
class ExactKeys:
    """Keys [H, E, D] that are always attended; a head's rows are contiguous, heads need not be. `count` [1] int32, on
    the keys' device, is how many of the E rows are valid; None: all. `sinks` [H, G]: learned logits beside them."""

    keys: torch.Tensor
    count: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    def repeated(self, each: int) -> "ExactKeys":
        """Keys of each head so many times; sinks are of queries already."""
        return ExactKeys(self.keys.repeat_interleave(each, 0), self.count, self.sinks)


@dataclass(frozen=True)
class KeyGroups:
    """Groups of keys: labels [H, M] int16 or int32, the group of each key, and taken [H, C] int32, to which how many
    keys of each are chosen is added. A head's labels are contiguous, heads need not be."""

    labels: torch.Tensor
    taken: torch.Tensor


@dataclass(frozen=True)
class TokenRanks:
    """Ranks, 0 to 255, of `keys` keys of each of H heads by their estimated attention probability.

    ranks [H, tiles, 2, 512] int32, 0 past the last key: the ranks of the q-th 32 consecutive keys of a tile are in
    words 4 q to 4 q + 3 of both rows; byte j of word 4 q + i of row h has that of key 8 j + 2 i + h of the 32.
    coarse [H, tiles, 16] int32: counts of a tile's ranks in bins of 16. Where ranks are 0 to 63 [H, tiles, 32]
    int32, of each: that of an even rank in a word's lower 16 bits, that of the next in the upper. logsumexp [H, G]
    float32 over the ranked logits and those of exact keys.
    """

    ranks: torch.Tensor
    coarse: torch.Tensor
    logsumexp: torch.Tensor
    keys: int

    def each_counted(self) -> bool:
        """Whether each rank is counted by itself."""
        return self.coarse.shape[2] == FEW_RANKS // 2

    def in_order(self) -> torch.Tensor:
        """Ranks [H, keys] int32 in the order of the keys."""
        bytes_of_words = self.ranks.contiguous().view(torch.uint8).unflatten(-1, (-1, 4, 4))
        by_key: torch.Tensor = bytes_of_words.permute(0, 1, 3, 5, 4, 2).flatten(1)[:, : self.keys].int()
        return by_key


def fewer_ranks(ranks: torch.Tensor) -> torch.Tensor:
    """`FEW_RANKS` in the place of `RANKS`."""
    fewer: torch.Tensor = (ranks + 3 * (ranks - FINE_FROM).clamp(0, FINE) + 1) >> 3
    return fewer


def lowest_rank(wanted: int) -> int:
    """Offset to subtract from the leading 13 bits of a float32 score to get its rank."""
    return least_rank(wanted, FRACTION_BITS)
