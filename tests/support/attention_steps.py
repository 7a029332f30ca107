"""Inputs of attention steps over runs of rows, exact rows and centroids, and the expected outputs."""

from dataclasses import dataclass, fields

import torch

from sparsekv.kernels.common.kernel_inputs import RunRows, ScoredCentroids
from sparsekv.kernels.common.row_operations import fill_budget
from support.kernel_runs import uneven_counts
from support.random_tensors import normal

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Largest relative errors of outputs, by the dtype of the inputs."""


@dataclass(frozen=True)
class Step:
    """Inputs of a step: query [H, G, D], middle and exact rows, runs of the middle, and centroids (fields
    `stand_...`)."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    exact_keys: torch.Tensor
    exact_values: torch.Tensor
    stand_logits: torch.Tensor
    stand_counts: torch.Tensor
    stand_values: torch.Tensor

    def arguments(
        self, stands: int
    ) -> tuple[torch.Tensor, RunRows, tuple[torch.Tensor, torch.Tensor], list[ScoredCentroids]]:
        ends = self.lengths.cumsum(-1, dtype=torch.int32)
        capacity = int(ends[:, -1].max()) if ends.numel() else 0
        runs = RunRows(self.keys, self.values, self.starts, ends, capacity)
        each = self.stand_logits, self.stand_counts, self.stand_values
        cut = [tensor.tensor_split(max(stands, 1), dim) for tensor, dim in zip(each, (2, 1, 1), strict=True)]
        parts = [ScoredCentroids(*(part.contiguous() for part in three)) for three in zip(*cut, strict=True)]
        return self.query, runs, (self.exact_keys, self.exact_values), parts[:stands]

    def on(self, device: torch.device) -> "Step":
        return Step(*(getattr(self, field.name).to(device) for field in fields(self)))


def some_step(
    seed: int = 0, *, H: int = 2, G: int = 3, D: int = 64, clusters: int = 40, budget: int = 90, exact: int = 70,
    dtype: torch.dtype = torch.float32,
) -> Step:  # fmt: skip
    """Return a random step whose runs are clusters of uneven sizes, chosen in random order up to the budget."""
    counts = uneven_counts(seed, H, clusters)
    M = int(counts.sum(1)[0])
    rows = [normal(seed + n, H, size, D).to(dtype) for n, size in enumerate((G, M, M, exact, exact, clusters))]
    order = torch.rand(H, clusters, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    taken = fill_budget(counts.gather(-1, order).long(), budget)
    lengths = torch.zeros_like(taken).scatter_(-1, order, taken)
    starts = counts.long().cumsum(-1) - counts
    logits, left = normal(seed + 9, H, G, clusters), (counts - lengths).float().log()
    return Step(2 * rows[0], *rows[1:3], starts, lengths, *rows[3:5], logits, left, rows[5])


def expected(step: Step, stands: bool, scale: float, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the expected output [H, G, D] float64, computed head by head."""
    outputs = []
    for h, query in enumerate(step.query.double()):
        runs = zip(step.starts[h].tolist(), step.lengths[h].tolist(), strict=True)
        rows = torch.tensor([row for start, length in runs for row in range(start, start + length)], dtype=torch.long)
        keys = torch.cat([step.keys[h, rows], step.exact_keys[h]]).double()
        values = torch.cat([step.values[h, rows], step.exact_values[h]]).double()
        logits = query @ keys.T * scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        if stands:
            logits = torch.cat([logits, step.stand_logits[h].double() + step.stand_counts[h].double()], -1)
            values = torch.cat([values, step.stand_values[h].double()])
        if sinks is not None:
            logits = torch.cat([logits, sinks[h].double()[:, None]], -1)
            values = torch.cat([values, values.new_zeros(1, values.shape[1])])
        outputs.append(logits.softmax(-1) @ values)
    return torch.stack(outputs)
