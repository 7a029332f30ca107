"""Inputs of decode steps over clusters, and the expected outputs in float64."""

from dataclasses import dataclass

import torch

from sparsekv.kernels.attention.cpu_steps import StepClusters, attend_to_best
from sparsekv.kernels.clusters.cluster_choice import CountedClusters, logs_and_shares
from sparsekv.kernels.common.row_operations import fill_budget
from support.kernel_runs import uneven_counts
from support.reference import random_attention, reference_attention

SCALE = 0.1
FORMS = {"compiled": attend_to_best, "torch": attend_to_best.reference}
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """Inputs of a step: queries [H, G, D], clusters, rows and exact rows in larger buffers, and options."""

    query: torch.Tensor
    clusters: StepClusters
    rows: Pair
    exact: Pair
    budget: int
    replace: bool = True
    sinks: torch.Tensor | None = None

    def attend(self, form: str) -> torch.Tensor:
        rest = {"replace": self.replace, "sink_logits": self.sinks}
        return FORMS[form](self.query, self.clusters, self.rows, self.exact, self.budget, **rest)

    def scores(self) -> torch.Tensor:
        """Return the scores S_i [H, C] float64 of Squeezed Attention's equation 1, averaged over the group."""
        counted, cap = self.clusters.counted, self.clusters.softcap
        logits = torch.einsum("hgd,hcd->hgc", self.query.double(), counted.centroids.double()) * SCALE
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        total = (logits + counted.counts[:, None].double().log()).logsumexp(-1, keepdim=True)
        return (logits - total).exp().mean(1).masked_fill(counted.counts == 0, 0)

    def expected(self) -> torch.Tensor:
        """Return the expected output [H, G, D] float64.

        A centroid that represents n tokens is attended like n copies of it.
        """
        counted, outputs = self.clusters.counted, []
        for head, order in enumerate(self.scores().argsort(dim=-1, descending=True, stable=True)):
            counts, taken = counted.counts[head].long(), torch.zeros_like(order)
            taken[order] = fill_budget(counts[order], self.budget)
            starts = self.clusters.starts[head].tolist()
            chosen = [row for start, n in zip(starts, taken.tolist(), strict=True) for row in range(start, start + n)]
            keys, values = (
                torch.cat([held[head, chosen], always[head]])
                for held, always in zip(self.rows, self.exact, strict=True)
            )
            if self.replace:
                assert self.clusters.values is not None
                copies = counts - taken
                keys = torch.cat([keys, counted.centroids[head].repeat_interleave(copies, 0)])
                values = torch.cat([values, self.clusters.values[head].repeat_interleave(copies, 0)])
            sinks = None if self.sinks is None else self.sinks[head : head + 1]
            query, how = self.query[head : head + 1, :, None], {"softcap": self.clusters.softcap, "sink_logits": sinks}
            outputs.append(reference_attention(query, keys[None], values[None], SCALE, **how)[0, :, 0])
        return torch.stack(outputs)


def some_step(
    seed: int = 0,
    *,
    H: int = 3,
    G: int = 3,
    D: int = 64,
    C: int = 40,
    E: int = 20,
    share: float = 0.2,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Return a step over clusters of uneven sizes, whose rows are in random order; the budget is `share` of the
    tokens."""
    counts = uneven_counts(seed, H, C)
    M = int(counts[0].sum())
    query, centroids, stand_values = random_attention(Hk=H, G=G, Q=1, T=C, D=D, dtype=dtype, seed=seed)
    _, keys, values = random_attention(Hk=H, T=M + 5, D=D, dtype=dtype, seed=seed + 1)
    _, exact_keys, exact_values = random_attention(Hk=H, T=E + 3, D=D, dtype=dtype, seed=seed + 2)
    order = torch.randperm(C, generator=torch.Generator().manual_seed(seed))
    starts = torch.empty(H, C, dtype=torch.int64)
    starts[:, order] = counts[:, order].long().cumsum(-1) - counts[:, order]
    logs, shares = logs_and_shares(counts)
    counted = CountedClusters(centroids, counts, logs[:, None], shares, M)
    clusters = StepClusters(counted, starts, stand_values, SCALE, softcap)
    return Step(query[:, :, 0], clusters, (keys, values), (exact_keys[:, :E], exact_values[:, :E]), round(share * M))
