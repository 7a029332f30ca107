"""Result types of choosing clusters, the precision of their scores, and lookup in a hierarchy of centroids."""

from dataclasses import dataclass

import torch

from sparsekv.kernels.common.runs import expand_runs
from sparsekv.kernels.scores.logits import attention_logits, scores_from_logits


@dataclass(frozen=True)
class Tree:
    """Levels of clusters, finest first, with centroids [Hk, C_I, D] and token counts [Hk, C_I] of each level I.

    The children of a cluster of level I >= 1 are contiguous in the level below. `children[I - 1]` [Hk, C_I] is their
    number, and `first_child[I - 1]` [Hk, C_I] the index of the first.
    """

    centroids: tuple[torch.Tensor, ...]
    counts: tuple[torch.Tensor, ...]
    first_child: tuple[torch.Tensor, ...]
    children: tuple[torch.Tensor, ...]


def tree_from_tensors(tensors: dict[str, torch.Tensor]) -> Tree:
    """Build a tree from the artifact's tensors levelI.centroids, levelI.counts and levelI.parent."""
    levels = sum(name.endswith(".centroids") for name in tensors)
    centroids = tuple(tensors[f"level{level}.centroids"] for level in range(levels))
    first_child, children = [], []
    for level in range(levels - 1):
        number = torch.zeros(centroids[level + 1].shape[:2], dtype=torch.int64, device=centroids[0].device)
        parent = tensors[f"level{level}.parent"].long()
        number.scatter_add_(1, parent, torch.ones_like(parent))
        children.append(number)
        first_child.append(number.cumsum(1) - number)
    counts = tuple(tensors[f"level{level}.counts"] for level in range(levels))
    return Tree(centroids, counts, tuple(first_child), tuple(children))


def child_scores(
    query: torch.Tensor,
    tree: Tree,
    level: int,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    capacity: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the scores of some clusters of a level, normalised over these clusters (Squeezed Attention, equation 3).

    Args:
        query: [Hk, G, Q, D].
        level: the level of the clusters.
        starts, lengths: [Hk, Q or 1, R], the clusters as runs of indices.
        capacity: number of slots for the clusters; allocates [Hk, Q or 1, capacity, D] centroids.

    Returns:
        scores [Hk, Q, capacity] (0 in unused slots), cluster indices and token counts [Hk, Q or 1, capacity].
    """
    clusters, valid = expand_runs(starts, lengths, capacity)
    Hk, rows = clusters.shape[0], clusters.shape[1]
    head = torch.arange(Hk, device=clusters.device)[:, None, None].expand(Hk, rows, 1)
    centroids = tree.centroids[level][head, clusters]
    counts = torch.where(valid, tree.counts[level][head, clusters], 0)
    # Queries that share their clusters are scored in one product. Otherwise each query is scored by its own clusters.
    by_row = query.unflatten(2, (rows, -1)).transpose(1, 2).flatten(0, 1)
    logits = attention_logits(by_row, centroids.flatten(0, 1), softmax_scale, softcap)
    logits = logits.unflatten(0, (Hk, rows)).transpose(1, 2).flatten(2, 3)
    return scores_from_logits(logits, counts[:, None]), clusters, counts


def fewest_tokens(counts: torch.Tensor) -> torch.Tensor:
    """Compute, for each n below C, the least number of tokens in any n + 1 non-empty clusters of a head.

    The result is [C] on the CPU, the minimum over heads. Its entries are at most the head's token count M.
    """
    total = counts.sum(-1, keepdim=True)
    smallest_first = torch.where(counts > 0, counts, total).sort(-1).values.long()
    return smallest_first.cumsum(-1).clamp(max=int(total[0])).amin(0).cpu()


# Scores are compared by their exponent and 7 fraction bits, which is the precision of bfloat16 keys.
SCORE_BITS = 7
# Clusters to open are compared by the exponent of the score alone, because their children are scored again.
OPENED_BITS = 0
# Scores are probabilities, and so at most `budget` tokens score above 1 / budget. All tokens with scores below 2^-16 /
# budget are negligible together. Therefore ranks distinguish only the 16 octaves (factors of 2) between these two
# scores.
EXPONENT_BITS = 4
TOKEN_BITS = 32 - EXPONENT_BITS - SCORE_BITS
MOST_TOKENS = 2**TOKEN_BITS - 1


def least_rank(budget: int, bits: int = SCORE_BITS) -> int:
    """Return the offset to subtract from the leading bits of a float32 score to get its rank.

    The leading bits are the sign, the exponent and `bits` fraction bits. All scores of at least b, which is 1 / budget
    rounded up to a power of two, share the highest rank. At most `budget` tokens score so high, so all are taken.
    """
    exponent = 1 - max(budget, 1).bit_length()
    return ((127 + exponent - int(2**EXPONENT_BITS)) << bits) + 1


@dataclass(frozen=True)
class ClusterChoice:
    """Members taken from C clusters of each of H heads.

    A member is a token, or a child: a cluster of the next finer level. `logits` [H, G, C or more] float32 are the
    query's logits for the centroids, minus infinity for empty clusters and past the last. `lengths` [H, C] int32 is the
    number of members taken from each cluster, from its first member on. `log_left` [H, C or more] float32 is the log of
    the number of a cluster's tokens that are not taken, minus infinity for none. `rows` [H, R] int32 lists the members
    taken, or as many of them as there are slots. The first `used` [H] int32 rows are valid. Kernels also return `queue`
    [H] int32 zeros, for `RunRows.queue` of the attention that follows.
    """

    logits: torch.Tensor
    lengths: torch.Tensor
    log_left: torch.Tensor
    rows: torch.Tensor
    used: torch.Tensor
    queue: torch.Tensor | None = None


@dataclass(frozen=True)
class SharedChoice:
    """Tokens that several questions together take from C clusters of each of H heads.

    The fields are defined as in `ClusterChoice`.
    """

    lengths: torch.Tensor
    log_left: torch.Tensor
    rows: torch.Tensor
    used: torch.Tensor


@dataclass(frozen=True)
class Children:
    """Children of C clusters of each of H heads in the level below.

    `numbers` [H, C] int32 is the number of children, and `first` [H, C] int the index of the first child. At most
    `slots` children are listed in a head. Their number is added to `seen` [H] int64, unless `seen` is None.
    """

    numbers: torch.Tensor
    first: torch.Tensor
    slots: int
    seen: torch.Tensor | None = None


@dataclass(frozen=True)
class ListedChoice:
    """Choice among the clusters that are listed in S slots of each of H heads.

    `chosen` is the `ClusterChoice` of the slots. `starts` [H, S] int32 is the first row of each slot's cluster.
    """

    chosen: ClusterChoice
    starts: torch.Tensor
