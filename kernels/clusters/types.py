"""What choosing clusters gives, and how finely scores are told apart: for the reference and its kernels alike."""

from dataclasses import dataclass

import torch

# A score is compared by its exponent and 7 bits of its fraction: as much as bfloat16 keeps of the keys it comes from.
SCORE_BITS = 7
# Of clusters that are opened by the exponent alone: their children are told apart again.
OPENED_BITS = 0
# No more than `budget` tokens have a score above 1 / budget, and with the best of a head's tokens above that divided by
# 2 ** 16, all others together are nothing: it is only between these that clusters are told apart.
EXPONENT_BITS = 4
TOKEN_BITS = 32 - EXPONENT_BITS - SCORE_BITS
MOST_TOKENS = 2**TOKEN_BITS - 1


def least_rank(budget: int, bits: int = SCORE_BITS) -> int:
    """What is subtracted from a float32's leading bits, `bits` of them of its fraction, to make ranks of scores.

    The highest rank is of all scores that reach 1 / budget, rounded up to a power of two: whatever has it is taken.
    """
    exponent = 1 - max(budget, 1).bit_length()
    return ((127 + exponent - int(2**EXPONENT_BITS)) << bits) + 1


@dataclass(frozen=True)
class ClusterChoice:
    """What was chosen of C clusters of each of H heads.

    logits [H, G, C or more] float32 of the query on the centroids, minus infinity on empty clusters and past the last;
    lengths [H, C] int32, members taken of each cluster, the first ones; log_left [H, C or more] float32, the logarithm
    of how many tokens of each were not taken, minus infinity for none; rows [H, R] int32, all members that were taken,
    of which there are used [H] int32: what comes after these is nothing. Kernels leave zeros, queue [H] int32, for the
    attention that follows to count in.
    """

    logits: torch.Tensor
    lengths: torch.Tensor
    log_left: torch.Tensor
    rows: torch.Tensor
    used: torch.Tensor
    queue: torch.Tensor | None = None


@dataclass(frozen=True)
class Children:
    """Clusters of a level as members of those above: numbers [H, C] int32 of each one's, and first [H, C] int, which;
    slots: for how many of a head there is to be room. seen [H] int64 or None: what is opened is added to it."""

    numbers: torch.Tensor
    first: torch.Tensor
    slots: int
    seen: torch.Tensor | None = None


@dataclass(frozen=True)
class ListedChoice:
    """What was chosen of the clusters in S slots of each of H heads: `ClusterChoice` of these, and the first row of
    each, starts [H, S] int32."""

    chosen: ClusterChoice
    starts: torch.Tensor
