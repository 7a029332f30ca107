"""MagicPIG (arXiv 2410.16179): samples tokens by locality-sensitive hashing, with importance weights.

The hash is SimHash: the K bits of a code are the signs of K random projections. Each of L tables has its own
projections. The head's mean key is subtracted from the keys before hashing. A query head samples a token if the codes
of query and key are equal in at least two of the L tables. The probability of sampling is u = 1 - (1 - p^K)^L - L p^K
(1 - p^K)^(L - 1). Here p = 1 - angle / pi, for the angle between query and key. Subtracting log u from the token's
logit makes numerator and denominator of the attention unbiased. Each query head samples its own tokens, and the group
reads their union. A head gives weight 0 to tokens that it did not sample. If more tokens are sampled than the budget
allows, the tokens with the most collisions over the group are kept. This makes the estimate biased. If the budget is
the whole middle, all tokens are attended to exactly.
"""

from dataclasses import dataclass, field
from math import pi

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.selection.interface import (
    Budget,
    Cost,
    Method,
    MiddleContext,
    Queries,
    RowSet,
    Selection,
    Selector,
    methods,
    single_rows,
)

MOST_BITS = 15  # a code is a non-negative int16
MOST_TABLES = 2**15 - 1  # collisions are counted in int16
LARGEST_SEED = 2**31 - 1
LAYERS_APART = 1_000_003  # added to the seed for each layer, whose projections must differ; a seed has 32 bits
TABLES_AT_ONCE = 8  # tables per matrix product; the product with one table's K columns would be slow


@methods.register("magicpig")
@dataclass(frozen=True)
class MagicPIG(Method):
    """Samples tokens by the hash codes of all keys."""

    hash_bits: int = field(default=10, metadata={"help": "Bits of a key's code in one table (K)."})
    hash_tables: int = field(
        default=150,
        metadata={"help": "Hash tables (L). A token is selected if its code is the query's in at least two tables."},
    )
    hash_seed: int = field(default=0, metadata={"help": "Seed of the random projections."})

    def __post_init__(self) -> None:
        if not 1 <= self.hash_bits <= MOST_BITS:
            raise UsageError(f"--hash-bits {self.hash_bits}: give a number from 1 to {MOST_BITS}")
        if self.hash_tables < 2:
            raise UsageError(f"--hash-tables {self.hash_tables}: give at least 2, because a token must be found in two")
        if self.hash_tables > MOST_TABLES:
            raise UsageError(f"--hash-tables {self.hash_tables}: give at most {MOST_TABLES:,}, such as 150")
        if not 0 <= self.hash_seed <= LARGEST_SEED:
            raise UsageError(f"--hash-seed {self.hash_seed}: give a number from 0 to {LARGEST_SEED}")

    def replaces(self) -> bool:
        """Return True: the weighted sample represents all tokens."""
        return True

    def prepare(self, context: MiddleContext) -> "HashSelector":
        """Create the selector of a layer.

        Allocates projections [L, D, K] and codes [L, Hk, M] int16. Temporarily allocates the keys in float32 twice, and
        their products with the projections of a few tables.
        """
        return HashSelector(self, context)


class HashSelector(Selector):
    """Samples tokens by their keys' hash codes `codes` [L, Hk, M] int16.

    `projections` [L, D, K] are random and differ between layers. `mean` is the mean key [Hk, 1, D].
    """

    def __init__(self, method: MagicPIG, context: MiddleContext):
        self.keys, D = context.keys, context.keys.shape[2]
        generator = torch.Generator().manual_seed(method.hash_seed + LAYERS_APART * context.position.number)
        shape = method.hash_tables, D, method.hash_bits
        self.projections = torch.randn(shape, generator=generator).to(self.keys.device)
        self.mean = self.keys.float().mean(1, keepdim=True)
        self.codes = self._codes(self.keys.float() - self.mean)
        bits = self.keys.shape[1] * method.hash_tables * method.hash_bits
        # A selection reads all codes, and the mean key, which is needed to compute the angles.
        self.index_rows = bits / 8 / (D * self.keys.element_size()) + 1

    def _codes(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute codes [L, ...] int16 of rows [..., D] float32. Allocates the products of a few tables at a time."""
        bits = self.projections.shape[2]
        places = 2.0 ** torch.arange(bits, device=rows.device)
        codes = []
        for some in self.projections.split(TABLES_AT_ONCE):
            products = rows @ some.transpose(0, 1).flatten(1)
            above = products.gt_(0).unflatten(-1, (-1, bits))
            codes.append((above @ places).to(torch.int16).movedim(-1, 0))
        return torch.cat(codes)

    def collisions(self, query: torch.Tensor) -> torch.Tensor:
        """Count in how many tables a query [Hk, G, Q, D] and a key have the same code: [Hk, G, Q, M] int16."""
        found = torch.zeros(*query.shape[:3], self.keys.shape[1], dtype=torch.int16, device=query.device)
        # `eq` writes int16, because converting booleans would take longer than comparing and adding.
        alike = torch.empty_like(found)
        for of_query, of_keys in zip(self._codes(query.float()), self.codes, strict=True):
            found += torch.eq(of_query[..., None], of_keys[:, None, None], out=alike)
        return found

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Select the sampled tokens, up to the budget, with their log-weights.

        If the budget is all tokens between sinks and tail, select them all, without log-weights.
        """
        tokens, together = budget.tokens(self.keys.shape[1]), (1, 2) if queries.joint else 1
        found = self.collisions(queries.query)
        drawn = found >= 2
        counts = (found * drawn).sum(together).view(len(found), -1, found.shape[-1])
        counts, starts = counts.topk(tokens, -1)
        if tokens == self.keys.shape[1]:
            return Selection(single_rows(starts), Cost(self.index_rows))
        by_head = drawn.gather(-1, starts[:, None].expand(*drawn.shape[:3], -1))
        weights = -self.log_probability(queries.query, starts)
        weights = weights.masked_fill(~by_head, -torch.inf)
        return Selection(RowSet(starts, (counts > 0).long(), tokens, log_weights=weights), Cost(self.index_rows))

    def log_probability(self, query: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the log of the probability that queries [Hk, G, Q, D] sample tokens [Hk, Q or 1, S].

        The result is [Hk, G, Q, S] float32.
        """
        rows = tokens.flatten(1)[..., None].expand(-1, -1, self.keys.shape[2])
        keys = (self.keys.gather(1, rows).float() - self.mean).view(*tokens.shape, -1)
        unit_keys = torch.nn.functional.normalize(keys, dim=-1)
        unit_query = torch.nn.functional.normalize(query.float(), dim=-1)
        cosines = torch.einsum("hgqd,hqsd->hgqs", unit_query, unit_keys.expand(-1, query.shape[2], -1, -1))
        alike = 1 - cosines.double().clamp(-1, 1).acos() / pi
        tables, _, bits = self.projections.shape
        one = alike**bits
        none = torch.log1p(-one)
        two = -torch.expm1(tables * none) - tables * one * ((tables - 1) * none).exp()
        # Rounding may give a probability of 0 to tokens that are practically never sampled.
        return two.clamp(min=torch.finfo(torch.float64).tiny).log().float()
