"""Types for ranks of keys by attention probability, and for keys that are always attended."""

from dataclasses import dataclass

import torch

from sparsekv.kernels.clusters.types import EXPONENT_BITS, least_rank

FRACTION_BITS = 4  # fraction bits of a score in its rank; the rounding of codes loses more than the dropped bits
BINS = 16  # number of coarse bins of ranks, and number of ranks in each bin
RANKS = 2 ** (EXPONENT_BITS + FRACTION_BITS)
assert BINS * BINS == RANKS
# If the keys of each rank are counted, ranks are coarser: FEW_RANKS instead of RANKS. A coarse rank spans half an
# octave of scores (an octave is a factor of 2), except for the original ranks from FINE_FROM up to FINE_FROM + FINE.
# There it spans an eighth of an octave, because the last chosen key's original rank is nearly always in this range.
FEW_RANKS, FINE_FROM, FINE = 64, 36, 85
LARGEST = 4095  # largest sum of weighted codes, with 12 bits, so that a sum shifted up by four bits fits in 16 bits


@dataclass(frozen=True)
class ExactKeys:
    """Keys [H, E, D] that are always attended; the rows of a head are contiguous, and heads may have any stride.

    The first `count` [1] int32, on the keys' device, of the E rows are valid, or all if `count` is None. `sinks` [H, G]
    are learned logits in the same softmax; None: the model has none.
    """

    keys: torch.Tensor
    count: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    def repeated(self, each: int) -> "ExactKeys":
        """Repeat each head's keys `each` times; `sinks` must already be [H * each, G], and are passed on unchanged."""
        return ExactKeys(self.keys.repeat_interleave(each, 0), self.count, self.sinks)


@dataclass(frozen=True)
class KeyGroups:
    """Groups of keys, such as clusters, and counters of the chosen keys of each group.

    `labels` [H, M] int16 or int32 is the group of each key. The labels of a head are contiguous; heads may have any
    stride. A function that chooses keys adds the number of chosen keys of each group to `taken` [H, C] int32.
    """

    labels: torch.Tensor
    taken: torch.Tensor


@dataclass(frozen=True)
class TokenRanks:
    """Ranks, 0 to 255 or 0 to 63, of `keys` keys of each of H heads by their attention probability, estimated or exact.

    `ranks` is [H, tiles, 2, 512] int32 for tiles of 4,096 keys, with rank 0 past the last key. Keys 32 q to 32 q + 31
    of a tile have their ranks in words 4 q to 4 q + 3 of both rows. Byte j of word 4 q + i of row h is the rank of key
    8 j + 2 i + h of these 32.

    `coarse` counts the ranks of each tile. For ranks 0 to 255 it is [H, tiles, 16] int32, with bins of 16 ranks. For
    ranks 0 to 63 it is [H, tiles, 32] int32, with a count for each rank. The count of an even rank is in a word's lower
    16 bits, that of the next rank in the upper 16 bits.

    `logsumexp` [H, G] float32 are the log-sum-exps of the query heads' logits, which normalise the probabilities.
    """

    ranks: torch.Tensor
    coarse: torch.Tensor
    logsumexp: torch.Tensor
    keys: int

    def each_counted(self) -> bool:
        """Whether `coarse` has a count for each rank."""
        return self.coarse.shape[2] == FEW_RANKS // 2

    def in_order(self) -> torch.Tensor:
        """Unpack the ranks to [H, keys] int32 in the order of the keys."""
        bytes_of_words = self.ranks.contiguous().view(torch.uint8).unflatten(-1, (-1, 4, 4))
        by_key: torch.Tensor = bytes_of_words.permute(0, 1, 3, 5, 4, 2).flatten(1)[:, : self.keys].int()
        return by_key


def fewer_ranks(ranks: torch.Tensor) -> torch.Tensor:
    """Convert ranks below `RANKS` to ranks below `FEW_RANKS`."""
    fewer: torch.Tensor = (ranks + 3 * (ranks - FINE_FROM).clamp(0, FINE) + 1) >> 3
    return fewer


def lowest_rank(wanted: int) -> int:
    """Return the offset to subtract from the leading 13 bits of a float32 score to get its rank.

    `wanted` is the number of keys to choose, the budget of `least_rank`.
    """
    return least_rank(wanted, FRACTION_BITS)
