"""Inputs of decode steps over codes, and the expected outputs in float64."""

from dataclasses import dataclass

import torch

from sparsekv.kernels.attention.cpu_steps import StepCodes, attend_by_codes, choose_by_codes
from support.kernel_runs import poisoned_memory, uneven_counts
from support.random_tensors import normal
from support.reference import random_attention

SCALE = 0.1
FORMS = {"compiled": attend_by_codes, "torch": attend_by_codes.reference}
APART = 1e-4  # share of the last chosen score by which scores must differ for a certain choice
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """Inputs of a step: queries [H, G, D], codes, rows and exact rows in larger buffers, and options."""

    query: torch.Tensor
    codes: StepCodes
    rows: Pair
    exact: Pair
    budget: int
    replace: bool = True
    sinks: torch.Tensor | None = None

    def attend(self, form: str = "compiled") -> torch.Tensor:
        rest = {"replace": self.replace, "sink_logits": self.sinks}
        with poisoned_memory():
            return FORMS[form](self.query, self.codes, self.rows, self.exact, self.budget, **rest)

    def choose(self) -> torch.Tensor:
        """Return the rows [H, budget] that `choose_by_codes` chooses, given one log-sum-exp of exact rows and sinks."""
        exact = self.logits(self.query, self.exact[0])
        sinks = [] if self.sinks is None else [self.sinks[..., None].double()]
        beside = torch.cat([exact, *sinks], -1).logsumexp(-1).float()
        with poisoned_memory():
            return choose_by_codes(self.query, self.codes, beside, self.budget)

    def logits(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        logits, cap = queries.double() @ keys.double().transpose(1, 2) * SCALE, self.codes.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def scores(self) -> torch.Tensor:
        """Return the rows' scores [H, M] float64: probabilities estimated from codes, averaged over the group."""
        codes, exact = self.codes, self.logits(self.query, self.exact[0])
        heads, parts = torch.arange(len(codes.codes))[:, None, None], torch.arange(codes.codes.shape[2])
        named = codes.books.double()[heads, parts, codes.codes.long()].flatten(2)
        weighed = self.logits(self.query, codes.centroids) + codes.masses[:, None].double()
        sinks = [] if self.sinks is None else [self.sinks[..., None].double()]
        total = torch.cat([weighed, exact, *sinks], -1).logsumexp(-1, keepdim=True)
        return (self.logits(self.query.double() @ codes.turn.double(), named) - total).exp().mean(1)

    def is_clear(self) -> bool:
        """Whether each row that is not chosen scores clearly less than the last chosen row."""
        ordered = self.scores().sort(-1, descending=True).values
        last, after = ordered[:, self.budget - 1], ordered[:, self.budget : self.budget + 1]
        return bool((after < (1 - APART) * last[:, None]).all())

    def expected(self) -> torch.Tensor:
        """Return the expected output [H, G, D] float64.

        A centroid that represents n rows is attended like n copies of it, weighted by its cluster's mass.
        """
        codes, outputs = self.codes, []
        for head, best in enumerate(self.scores().argsort(-1, descending=True)[:, : self.budget]):
            keys, values = (
                torch.cat([held[head, best], always[head]]).double()
                for held, always in zip(self.rows, self.exact, strict=True)
            )
            logits = self.logits(self.query[head : head + 1], keys[None])[0]
            if self.replace:
                taken = torch.bincount(codes.labels[head, best], minlength=codes.counts.shape[1])
                share = (codes.counts[head] - taken).double() / codes.counts[head].clamp(min=1)
                weights = share.log() + codes.masses[head]
                of_clusters = self.logits(self.query[head : head + 1], codes.centroids[head : head + 1])[0] + weights
                logits = torch.cat([logits, of_clusters], -1)
                values = torch.cat([values, codes.values[head].double()])
            if self.sinks is not None:
                logits = torch.cat([logits, self.sinks[head][:, None].double()], -1)
                values = torch.cat([values, torch.zeros_like(values[:1])])
            outputs.append(logits.softmax(-1) @ values)
        return torch.stack(outputs)


def some_step(
    seed: int = 0,
    *,
    H: int = 3,
    G: int = 3,
    D: int = 64,
    m: int = 8,
    C: int = 40,
    E: int = 20,
    named: int = 256,
    share: float = 0.1,
    softcap: float | None = None,
) -> Step:
    """Return a step over random codes and clusters of uneven sizes, some empty; the budget is `share` of the rows."""
    counts, generator = uneven_counts(seed, H, C), torch.Generator().manual_seed(seed)
    M = int(counts[0].sum())
    labels = [torch.arange(C).repeat_interleave(of_head)[torch.randperm(M, generator=generator)] for of_head in counts]
    query, centroids, values = random_attention(Hk=H, G=G, Q=1, T=C, D=D, seed=seed)
    _, keys, row_values = random_attention(Hk=H, T=M + 5, D=D, seed=seed + 1)
    _, exact_keys, exact_values = random_attention(Hk=H, T=E + 3, D=D, seed=seed + 2)
    codes = StepCodes(
        turn=normal(seed, H, D, D) / D**0.5,
        books=2 * normal(seed + 1, H, m, named, D // m),
        codes=torch.randint(0, named, (H, M, m), generator=generator).byte(),
        labels=torch.stack(labels).int(),
        centroids=centroids,
        counts=counts,
        masses=counts.log() + 0.3 * normal(seed + 2, H, C),
        values=values,
        softmax_scale=SCALE,
        softcap=softcap,
    )
    return Step(
        query[:, :, 0], codes, (keys, row_values), (exact_keys[:, :E], exact_values[:, :E]), budget_of(share, M)
    )


def budget_of(share: float, rows: int) -> int:
    return max(1, round(share * rows))
