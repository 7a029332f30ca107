"""Choice of clusters by their centroids within a budget of tokens, for one decode step or for several questions.

The results have types of their own, because kernels and selectors share them.
"""

from dataclasses import dataclass

import torch

from sparsekv.kernels.common.kernel_inputs import Int8Kernel, Keys
from sparsekv.kernels.common.on_gpu import on_gpu
from sparsekv.kernels.common.row_operations import expand_runs, fill_budget
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


SPARE = 32  # clusters that `CountedClusters.expected` adds to twice the mean number that fills a budget


def logs_and_shares(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log(counts) and 1 / counts of counts [H, C] int; both results are [H, C] float32.

    For a count of 0 they are minus infinity and 0.
    """
    return counts.float().log(), counts.float().reciprocal().masked_fill(counts == 0, 0)


@dataclass(frozen=True)
class CountedClusters:
    """C clusters of each of H heads.

    `centroids` is [H, C, D], and `counts` [H, C] int counts their tokens. `log_counts` [H, 1, C] and `shares` [H, C]
    come from `logs_and_shares`. `tokens` is the number of tokens of each head.
    """

    centroids: torch.Tensor
    counts: torch.Tensor
    log_counts: torch.Tensor
    shares: torch.Tensor
    tokens: int

    def expected(self, budget: int) -> int:
        """Return how many of the best clusters nearly always hold `budget` tokens.

        The result is twice the number of clusters of mean size that hold the budget, plus SPARE, and at most C.
        """
        C = self.counts.shape[1]
        return min(C, SPARE + 2 * C * budget // max(1, self.tokens))


@dataclass(frozen=True)
class BestClusters:
    """The R best of C clusters of each of H heads, best first, which together hold a budget of tokens.

    Clusters of equal score are in any order. `logits` [H, G, C] float32 are the query's logits for all centroids plus
    the log counts. `clusters` [H, R] int64 are the indices of the best clusters. `lengths` [H, R] int64 is the number
    of tokens to take from each of them, 0 once the budget is used up. `left` [H, R] int64 is the number of the other
    tokens of each.
    """

    logits: torch.Tensor
    clusters: torch.Tensor
    lengths: torch.Tensor
    left: torch.Tensor

    def log_share_left(self, shares: torch.Tensor) -> torch.Tensor:
        """Compute the log [H, 1, C] float32 of the share of each cluster's tokens that are not taken.

        `shares` [H, C] are 1 / the clusters' token counts, as in `CountedClusters`. For an empty cluster the result is
        0, or minus infinity if the cluster is one of the R best.
        """
        left = shares.gather(1, self.clusters).mul_(self.left).log_()
        return torch.zeros_like(shares).scatter_(1, self.clusters, left).unsqueeze(1)


def best_clusters(
    query: torch.Tensor, clusters: CountedClusters, budget: int, softmax_scale: float, softcap: float | None = None
) -> BestClusters:
    """Choose the clusters with the highest scores S_i, averaged over the query heads, until they hold the budget.

    `cluster_scores` defines S_i. Clusters are taken whole, except for the last, of which only the first tokens are
    taken.

    Args:
        query: [H, G, D].
        budget: number of tokens to take in each head, at most the head's number of tokens.

    Returns:
        See `BestClusters`. Allocates the logits twice.
    """
    if softcap is None and query.dtype == clusters.centroids.dtype == torch.float32:
        centroids = clusters.centroids.transpose(1, 2)
        logits = torch.baddbmm(clusters.log_counts, query, centroids, alpha=softmax_scale)
    else:
        logits = attention_logits(query.unsqueeze(2), clusters.centroids, softmax_scale, softcap).squeeze(2)
        logits = logits + clusters.log_counts
    # The softmax of cluster i is N_i S_i, and so it is divided by the token count N_i. The sum over the query heads
    # gives the same order as the mean.
    scores = logits.softmax(-1).sum(1).mul_(clusters.shares)
    several = clusters.expected(budget)
    while True:
        best = scores.topk(several).indices
        counts = clusters.counts.gather(1, best).long()
        ends = counts.cumsum(1)
        if several == scores.shape[1] or min(ends[:, -1].tolist()) >= budget:
            break
        several = scores.shape[1]
    left = torch.minimum((ends - budget).clamp_(min=0), counts)
    return BestClusters(logits, best, counts - left, left)


@on_gpu("sparsekv.kernels.clusters.cluster_choice_triton:choose_clusters_triton")
def choose_clusters(
    query: torch.Tensor,
    centroids: Keys,
    counts: torch.Tensor,
    starts: torch.Tensor,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
    threshold: float | None = None,
    seen: torch.Tensor | None = None,
) -> ClusterChoice:
    """Choose the clusters with the highest scores S_i, averaged over the query heads, until they hold the budget.

    `cluster_scores` defines S_i. Clusters are taken whole, except for the last, of which only the first tokens are
    taken. Scores are compared by the exponent and 7 fraction bits, about one part in 128. Of equal clusters, the one
    with the lower index comes first. With a threshold, all clusters whose S_i reaches it are taken instead. On a GPU
    there are four kernels, or three with a threshold, no synchronisation and no data-dependent shapes.

    Args:
        query: [H, G, D]; centroids: [H, C, D]; counts, starts: [H, C] int, token count and first row of each cluster.
        budget: number of tokens to take in each head; with a threshold, the capacity in tokens. A head has at most
            `MOST_TOKENS` (2,097,151) tokens.
        seen: [H] int64, to which `used` is added.

    Returns:
        See `ClusterChoice`. Allocates the logits, the rows and nine tensors [H, C].
    """
    logits, scores = _scored(query, centroids, counts, softmax_scale, softcap)
    lengths = _filled(scores, counts, budget) if threshold is None else (counts * (scores >= threshold)).int()
    return _count_seen(choice_of(logits, lengths, counts - lengths, starts, budget), seen)


def _scored(
    query: torch.Tensor, centroids: Keys, counts: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logits [H, G, C] and scores [H, C] of clusters."""
    if isinstance(centroids, Int8Kernel):
        centroids, _ = centroids.restored(torch.promote_types(query.dtype, torch.float32))
    logits = attention_logits(query[:, :, None], centroids, scale, softcap)[:, :, 0]
    logits = logits.masked_fill(counts[:, None] == 0, -torch.inf)
    return logits, scores_from_logits(logits[:, :, None], counts[:, None, None])[:, 0]


def _filled(scores: torch.Tensor, counts: torch.Tensor, budget: int) -> torch.Tensor:
    """Compute the number of tokens to take from each cluster, [..., C] int32, from scores and counts [..., C]."""
    order = ranked(scores, budget)
    taken = fill_budget(counts.gather(-1, order).int(), budget).int()
    return torch.zeros_like(taken).scatter_(-1, order, taken)


def ranked(scores: torch.Tensor, budget: int, bits: int = SCORE_BITS) -> torch.Tensor:
    """Sort clusters by rank, highest first; return their indices [..., C].

    A rank is the exponent and the first `bits` fraction bits of a score, clamped to the range that `least_rank` defines
    for the budget. Clusters of equal rank keep their order.
    """
    ranks = (scores.view(torch.int32) >> (23 - bits)) - least_rank(budget, bits)
    return ranks.clamp(0, 2 ** (EXPONENT_BITS + bits) - 1).argsort(dim=-1, descending=True, stable=True)


def best_first(scores: torch.Tensor, budget: int, bits: int = SCORE_BITS) -> torch.Tensor:
    """Sort clusters in the order in which the kernels for one query take them; return indices [..., C].

    These kernels order clusters by rank on a GPU, and by score on a CPU. With the same order here, a question gets the
    same clusters whether it is alone or one of several. `budget` and `bits` are as in `ranked`.
    """
    return ranked(scores, budget, bits) if scores.is_cuda else scores.argsort(dim=-1, descending=True, stable=True)


def choice_of(
    logits: torch.Tensor, lengths: torch.Tensor, left: torch.Tensor, starts: torch.Tensor, slots: int
) -> ClusterChoice:
    """Build a `ClusterChoice` with its rows, at most `slots` of them, in the order of the clusters."""
    rows, _ = expand_runs(starts, lengths, slots)
    used = lengths.sum(-1, dtype=torch.int32).clamp_(max=slots)
    return ClusterChoice(logits, lengths, left.float().log(), rows.int(), used)


@on_gpu("sparsekv.kernels.clusters.cluster_choice_triton:open_clusters_triton")
def open_clusters(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    children: Children,
    wanted: int,
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ClusterChoice:
    """Choose whole clusters, best first, until they have `wanted` children and `budget` tokens in each head.

    A child is a cluster of the next finer level. Scores are compared by their exponent alone: of clusters whose scores
    lie between the same powers of two, the one with the lower index comes first. This saves a launch on a GPU, and
    changes little, because the children are scored again.

    Args:
        query: [H, G, D]; centroids: [H, C, D]; counts: [H, C] int32 of tokens.
        wanted: least number of children in each head; budget: least number of tokens in each head.

    Returns:
        A `ClusterChoice` whose members are children.
    """
    logits, scores = _scored(query, centroids, counts, softmax_scale, softcap)
    order = ranked(scores, budget, OPENED_BITS)
    opened = until_enough(counts.gather(-1, order), children.numbers.gather(-1, order), wanted, budget)
    opened = torch.zeros_like(opened).scatter_(-1, order, opened)
    lengths = (children.numbers * opened).int()
    return _count_seen(choice_of(logits, lengths, counts * ~opened, children.first, children.slots), children.seen)


def _count_seen(choice: ClusterChoice, seen: torch.Tensor | None) -> ClusterChoice:
    if seen is not None:
        seen += choice.used
    return choice


def until_enough(counts: torch.Tensor, children: torch.Tensor, wanted: int, budget: int) -> torch.Tensor:
    """Return a mask [..., C] bool of the clusters to open, whose children will be scored.

    Clusters are opened, best first, until they hold `budget` tokens and `wanted` children. `counts` and `children`
    [..., C] are the numbers of tokens and of children of the clusters, best first.
    """
    held, had = counts.cumsum(-1) - counts, children.cumsum(-1) - children
    return (held < budget) | (had < wanted)


@on_gpu("sparsekv.kernels.clusters.cluster_choice_triton:choose_listed_triton")
def choose_listed(
    query: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    first_row: torch.Tensor,
    listed: tuple[torch.Tensor, torch.Tensor],
    budget: int,
    softmax_scale: float,
    softcap: float | None = None,
) -> ListedChoice:
    """Choose among listed clusters like `choose_clusters`, with scores normalised over the listed clusters alone.

    This is equation 3 of Squeezed Attention. The plain-torch implementation copies the centroids.

    Args:
        query: [H, G, D]; centroids: [H, C, D]; counts, first_row: [H, C] int32.
        listed: indices [H, S] int32 of the clusters to choose among, and the number [H] int32 of valid indices.
        budget: number of tokens to take in each head.

    Returns:
        See `ListedChoice`. Allocates the logits, the rows and nine tensors [H, S].
    """
    valid = torch.arange(listed[0].shape[1], device=query.device) < listed[1][:, None]
    clusters = torch.where(valid, listed[0], 0).long()
    some = centroids.gather(1, clusters[..., None].expand(-1, -1, centroids.shape[2]))
    numbers, starts = counts.gather(-1, clusters) * valid, first_row.gather(-1, clusters) * valid
    logits, scores = _scored(query, some, numbers, softmax_scale, softcap)
    lengths = _filled(scores, numbers, budget)
    return ListedChoice(choice_of(logits, lengths, numbers - lengths, starts, budget), starts.int())


MOST_CLUSTERS = 32_768
"""Maximum number of clusters of a head in `choose_together`, because one program ranks all of them at once."""


@on_gpu("sparsekv.kernels.clusters.shared_choice_triton:choose_together_triton")
def choose_together(
    query: torch.Tensor,
    ends: torch.Tensor,
    centroids: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    budget: int,
    capacity: int,
    softmax_scale: float,
    softcap: float | None = None,
    thresholds: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> SharedChoice:
    """Choose clusters for B questions, each up to its budget or down to its threshold; return the union of the choices.

    A question's score of a cluster is the mean of `cluster_scores` over the question's tokens. Of each cluster, the
    union has as many tokens as the question that takes most of it. On a GPU there are four kernels, no synchronisation
    and no data-dependent shapes.

    Args:
        query: [H, G, T, D], tokens of all questions, one question after another.
        ends: [B] int32, the end of each question in the T tokens, exclusive. Each question has at least one token.
        centroids: [H, C, D], C at most `MOST_CLUSTERS`; counts, starts: [H, C] int, token count and first row of each
            cluster, with at most `MOST_TOKENS` tokens a head.
        budget: number of tokens for each question in each head.
        capacity: number of row slots of a head.
        thresholds: [B] float32, the threshold of each question; None: the budget decides.
        seen: [H] int64, to which `used` is added.

    Returns:
        See `SharedChoice`. Allocates scores [H, T, C] float32, the rows, and three tensors [H, C].
    """
    empty = counts[:, None, None] == 0
    logits = attention_logits(query, centroids, softmax_scale, softcap).masked_fill(empty, -torch.inf)
    each = scores_from_logits(logits, counts[:, None, None])
    question = torch.searchsorted(ends, torch.arange(query.shape[2], device=ends.device), right=True, out_int32=True)
    sums = each.new_zeros(len(each), len(ends), each.shape[2]).index_add_(1, question, each)
    scores, sizes = sums / ends.diff(prepend=ends.new_zeros(1))[:, None], counts[:, None].expand_as(sums)
    taken = _filled(scores, sizes, budget) if thresholds is None else sizes * (scores >= thresholds[:, None])
    lengths = taken.amax(1).int()
    chosen = _count_seen(choice_of(logits, lengths, counts - lengths, starts, capacity), seen)
    return SharedChoice(chosen.lengths, chosen.log_left, chosen.rows, chosen.used)
