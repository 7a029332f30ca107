"""Inputs of a step of several sequences: queries, the rows that all attend to, and the rows of each sequence."""

import math
from dataclasses import dataclass

import torch

from sparsekv.kernels.attention.attention import OwnRows
from sparsekv.kernels.attention.decode_attention import shared_decode
from sparsekv.kernels.attention.shared_decode_triton import shared_decode_triton
from sparsekv.kernels.common.kernel_inputs import Centroids, RunRows
from support.kernel_runs import DEVICE, poisoned_memory
from support.random_tensors import normal

M, E, C, S, T = 60, 7, 11, 5, 40


@dataclass(frozen=True)
class Case:
    """Tokens of several sequences with rows of their own in a poisoned buffer, and the rows that all tokens share."""

    query: torch.Tensor
    runs: RunRows
    exact: tuple[torch.Tensor, torch.Tensor]
    centroids: list[Centroids]
    own: OwnRows
    sinks: torch.Tensor | None
    scale: float
    softcap: float | None

    def by_kernels(self) -> torch.Tensor:
        with poisoned_memory():
            return shared_decode_triton(
                self.query, self.runs, self.exact, self.centroids, self.own, self.scale, self.softcap, self.sinks
            ).cpu()

    def by_torch(self) -> torch.Tensor:
        return shared_decode.reference(
            self.query, self.runs, self.exact, self.centroids, self.own, self.scale, self.softcap, self.sinks
        ).cpu()

    def by_definition(self) -> torch.Tensor:
        """Compute the output [Hk, G, B, D] float64, one query after another."""
        Hk, G, B, _ = self.query.shape
        output = torch.empty(self.query.shape, dtype=torch.float64)
        for h in range(Hk):
            used = self.runs.capacity if self.runs.used is None else int(self.runs.used[h])
            rows = self.runs.starts[h, :used].long()
            for b in range(B):
                slot, first, last = (int(one[b]) for one in (self.own.slots, self.own.first, self.own.used))
                keys = [self.runs.keys[h, rows], self.exact[0][h], self.own.keys[slot, h, first:last]]
                values = [self.runs.values[h, rows], self.exact[1][h], self.own.values[slot, h, first:last]]
                for g in range(G):
                    logits = torch.cat(keys).double() @ self.query[h, g, b].double() * self.scale
                    if self.softcap is not None:
                        logits = self.softcap * torch.tanh(logits / self.softcap)
                    of_value = [*values]
                    for part in self.centroids:
                        stood = part.keys[h].double() @ self.query[h, g, b].double() * self.scale
                        stood = stood if self.softcap is None else self.softcap * torch.tanh(stood / self.softcap)
                        logits = torch.cat([logits, stood + part.log_counts[h, :C].double()])
                        of_value = [*of_value, part.values[h]]
                    if self.sinks is not None:
                        logits = torch.cat([logits, self.sinks[h, g].double()[None]])
                        of_value = [*of_value, values[0].new_zeros(1, values[0].shape[1])]
                    output[h, g, b] = (logits.softmax(-1) @ torch.cat(of_value).double()).cpu()
        return output


def some_case(
    *, dtype: torch.dtype = torch.float32, Hk: int = 2, G: int = 3, B: int = 5, D: int = 64,
    used: tuple[int, ...] = (25,), exact: int = E, stands: bool = True, softcap: float | None = None,
    sinks: bool = False,
) -> Case:  # fmt: skip
    def rows(seed: int, *shape: int) -> torch.Tensor:
        return normal(seed, *shape, D).to(dtype).to(DEVICE)

    query = 2 * rows(0, B, Hk, G).permute(1, 2, 0, 3)  # in memory token by token, as a model lays it out
    last = 1 + 7 * torch.arange(B, device=DEVICE) % T
    own = OwnRows(
        rows(1, S, Hk, T), rows(2, S, Hk, T), torch.arange(B, device=DEVICE) % S, (last - 9).clamp(min=0), last
    )
    chosen = torch.stack([torch.randperm(M, generator=torch.Generator().manual_seed(h)) for h in range(Hk)])
    counts = torch.tensor([used[h % len(used)] for h in range(Hk)], dtype=torch.int32, device=DEVICE)
    centroids, log_counts = rows(3, Hk, C), torch.full((Hk, C), math.log(3.0), device=DEVICE)
    log_counts[:, 2] = -torch.inf
    return Case(
        query=query,
        runs=RunRows(rows(4, Hk, M), rows(5, Hk, M), chosen.int().to(DEVICE), None, M, counts),
        exact=(rows(6, Hk, exact), rows(7, Hk, exact)),
        centroids=[Centroids(centroids, rows(8, Hk, C), log_counts)] if stands else [],
        own=own,
        sinks=normal(9, Hk, G).to(DEVICE) if sinks else None,
        scale=D**-0.5,
        softcap=softcap,
    )
