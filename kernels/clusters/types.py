"""Results of choosing clusters, and the precision in which scores are compared, for the reference and its kernels."""

from dataclasses import dataclass

import torch

# Scores are compared by their exponent and 7 bits of their fraction, the precision of the bfloat16 keys they come from.
SCORE_BITS = 7
# Clusters to open are compared by the exponent alone, because their children are scored again.
OPENED_BITS = 0
# Scores are probabilities, so at most `budget` tokens are above 1 / budget, and tokens below 2 ** -16 of that are
# negligible together: only the 16 octaves between are distinguished.
EXPONENT_BITS = 4
TOKEN_BITS = 32 - EXPONENT_BITS - SCORE_BITS
MOST_TOKENS = 2**TOKEN_BITS - 1


def least_rank(budget: int, bits: int = SCORE_BITS) -> int:
    """Offset to subtract from a float32 score's leading bits, `bits` of them fraction bits, to get its rank.

    Scores that reach 1 / budget, rounded up to a power of two, share the highest rank: all of these are taken.
    """
    exponent = 1 - max(budget, 1).bit_length()
    return ((127 + exponent - int(2**EXPONENT_BITS)) << bits) + 1


@dataclass(frozen=True)
class ClusterChoice:
    """Members taken of C clusters of each of H heads; a member is a token, or a child of a cluster to open.

    logits [H, G, C or more] float32 of the query on the centroids, minus infinity for empty clusters and past the last;
    lengths [H, C] int32, how many members are taken of each cluster, from its first on; log_left [H, C or more]
    float32, the log of how many tokens of each are not taken, minus infinity for none; rows [H, R] int32, all members
    taken, of which the first used [H] int32 are valid. Kernels also return queue [H] int32 zeros, a counter for the
    attention that follows.
    """

    logits: torch.Tensor
    lengths: torch.Tensor
    log_left: torch.Tensor
    rows: torch.Tensor
    used: torch.Tensor
    queue: torch.Tensor | None = None


@dataclass(frozen=True)
class SharedChoice:
    """Tokens that several questions take together of C clusters of each of H heads: lengths, log_left, rows and used of
    a `ClusterChoice`."""

    lengths: torch.Tensor
    log_left: torch.Tensor
    rows: torch.Tensor
    used: torch.Tensor


@dataclass(frozen=True)
class Children:
    """Children of C clusters in the level below: numbers [H, C] int32, how many each has; first [H, C] int, the first
    of them; slots: capacity in children of a head. seen [H] int64 or None: the number of children taken is added."""

    numbers: torch.Tensor
    first: torch.Tensor
    slots: int
    seen: torch.Tensor | None = None


@dataclass(frozen=True)
class ListedChoice:
    """Choice among the clusters listed in S slots of each of H heads: the `ClusterChoice` of the slots, and starts
    [H, S] int32, the first row of each cluster."""

    chosen: ClusterChoice
    starts: torch.Tensor
