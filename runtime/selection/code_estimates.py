"""Estimated logits of queries on keys that are known by their product codes."""

from functools import cached_property

import torch
from torch.nn.functional import embedding_bag

from sparsekv.formats.schema import LayerFacts
from sparsekv.kernels.scores.logits import softcapped

MOST = 60.0  # of a logit above its log-sum-exp: its exponential, summed, is a float32


class CodeEstimates:
    """One layer's codes [Hk, M, m] uint8 and what they name: turn [Hk, D, D], codebooks [Hk, m, C, D / m] float32.

    Args:
        tensors: of the index; see `CodesIndexer.build_layer`.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], facts: LayerFacts):
        self.turn, self.codebooks = tensors["query_turn"].float(), tensors["codebooks"].float()
        self.codes, self.facts = tensors["codes"], facts

    def of(self, query: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Estimated logits [Hk, G, Q, S] float32 of queries [Hk, G, Q, D] on tokens [Hk, Q or 1, S]."""
        codes = self.codes.gather(1, tokens.flatten(1)[..., None].expand(-1, -1, self.codes.shape[2]))
        codes = codes.view(*tokens.shape, -1)[:, None]
        logits = torch.zeros(*query.shape[:3], tokens.shape[-1], device=query.device)
        for part, table in enumerate(self._tables(query).unbind(3)):
            logits += table.gather(-1, codes[..., part].long().expand_as(logits))
        return self._capped(logits)

    def of_all(self, query: torch.Tensor) -> torch.Tensor:
        """The same of all tokens [Hk, G, Q, M], on a CPU as sums of tables' rows, for which torch has an operation."""
        Hk, G, Q, _ = query.shape
        if query.is_cuda:
            return self.of(query, torch.arange(self.codes.shape[1], device=query.device).expand(Hk, 1, -1))
        rows = self._tables(query).permute(0, 3, 4, 1, 2).reshape(-1, G * Q)
        sums = embedding_bag(self.places, rows, mode="sum").view(Hk, -1, G, Q)
        return self._capped(sums.permute(0, 2, 3, 1))

    @cached_property
    def places(self) -> torch.Tensor:
        """[Hk * M, m] int32: the rows of each token's codes among all heads' and parts' tables."""
        (Hk, _, m), C = self.codes.shape, self.codebooks.shape[2]
        tables = C * torch.arange(Hk * m, dtype=torch.int32).view(Hk, 1, m)
        return (self.codes + tables).flatten(0, 1)

    def _tables(self, query: torch.Tensor) -> torch.Tensor:
        """Products [Hk, G, Q, m, C] of each part of the turned queries with its centroids."""
        turned = torch.einsum("hgqd,hde->hgqe", query.float(), self.turn)
        parts = turned.unflatten(-1, (self.codebooks.shape[1], -1))
        return torch.einsum("hgqpd,hpcd->hgqpc", parts, self.codebooks)

    def _capped(self, products: torch.Tensor) -> torch.Tensor:
        return softcapped(products * self.facts.softmax_scale, self.facts.softcap)


def probability(logits: torch.Tensor, total: torch.Tensor, *, joint: bool) -> torch.Tensor:
    """Probabilities [Hk, Q, S] of logits [Hk, G, Q, S], the mean over the group; of a joint selection [Hk, 1, S], the
    mean over its queries too. `total` [Hk, G, Q]: the log-sum-exp of all that is attended."""
    # That is an estimate, above which a logit can be.
    probability = (logits - total[..., None]).clamp(max=MOST).exp().mean(1)
    return probability.mean(1, keepdim=True) if joint else probability
