"""A decode step over clusters on a CPU: the choice of clusters and the attention that follows, at once."""

import ctypes
import importlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from sparsekv.kernels.attention.attention import attend_once
from sparsekv.kernels.attention.types import ScoredCentroids, StepTensors
from sparsekv.kernels.clusters.best_clusters import best_clusters
from sparsekv.kernels.common.runs import expand_full_runs

if TYPE_CHECKING:
    from sparsekv.kernels.attention.cluster_step_numba import CompiledStep


@lru_cache(maxsize=1)
def compiled_kernels() -> ModuleType | None:
    """The kernels that numba compiles, the first time in seconds, later from disk; None where there is no numba, or no
    OpenMP whose threads torch uses."""
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return None
    try:
        return importlib.import_module("sparsekv.kernels.attention.cluster_step_numba")
    except ImportError:
        return None


@dataclass(frozen=True)
class StepClusters(StepTensors):
    """The same, with the compiled kernel for them."""

    @cached_property
    def compiled(self) -> "CompiledStep | None":
        """The kernel for these; None where there is none."""
        counted = self.counted
        wanted = [(counted.centroids, torch.float32), (counted.log_counts, torch.float32)]
        wanted += [(counted.counts, torch.int32), (self.starts, torch.int64)]
        wanted += [] if self.values is None else [(self.values, torch.float32)]
        if not all(tensor.dtype == dtype and tensor.is_contiguous() and tensor.is_cpu for tensor, dtype in wanted):
            return None
        kernels = compiled_kernels()
        return None if kernels is None else kernels.CompiledStep(self)


def attend_to_best(
    query: torch.Tensor,
    clusters: StepClusters,
    rows: tuple[torch.Tensor, torch.Tensor],
    exact: tuple[torch.Tensor, torch.Tensor],
    budget: int,
    *,
    replace: bool,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """One softmax over the rows of `best_clusters`, exact rows, and what is to stand for all others.

    Float32 goes to a compiled kernel where numba is there: it reads rows where they lie, and its result depends on the
    number of torch's threads alone.

    Args:
        query: [H, G, D].
        rows: keys and values [H, M, D], of which clusters are runs; a head's rows are contiguous, heads need not be.
        exact: keys and values [H, E, D] that are always attended; alike.
        budget: tokens to take of each head, which has as many at least.
        replace: let the clusters' values stand for the others.
        sink_logits: [H, G] learned logits that take part in the softmax and carry no value.

    Returns:
        [H, G, D] in the query's dtype.
    """
    compiled = clusters.compiled
    if compiled is not None and _reached(query, *rows, *exact):
        sinks = None if sink_logits is None else sink_logits.float().contiguous()
        return compiled.attend(query.contiguous(), rows, exact, budget, replace, sinks)
    return attend_to_best_reference(query, clusters, rows, exact, budget, replace=replace, sink_logits=sink_logits)


def _reached(query: torch.Tensor, *rows: torch.Tensor) -> bool:
    if query.dtype != torch.float32 or query.requires_grad:
        return False
    D = query.shape[2]
    return all(held.dtype == torch.float32 and held.stride()[1:] == (D, 1) for held in rows)


def attend_to_best_reference(
    query: torch.Tensor,
    clusters: StepClusters,
    rows: tuple[torch.Tensor, torch.Tensor],
    exact: tuple[torch.Tensor, torch.Tensor],
    budget: int,
    *,
    replace: bool,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend_to_best` in plain torch: gathers the rows."""
    counted, how = clusters.counted, (clusters.softmax_scale, clusters.softcap)
    best = best_clusters(query, counted, budget, *how)
    chosen = expand_full_runs(clusters.starts.gather(1, best.clusters), best.lengths, budget)
    picked = [_picked(held, chosen) for held in rows]
    stand_ins = []
    if replace:
        assert clusters.values is not None
        share = best.log_share_left(counted.shares).squeeze(1)
        # With these logits, which are whole clusters', go shares of them in the place of counts.
        stand_ins = [ScoredCentroids(best.logits, share, clusters.values)]
    return attend_once(query, ((picked[0], picked[1]), exact), stand_ins, *how, sink_logits)


def _picked(held: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Rows [H, M, D] by numbers [H, R]."""
    H, M, D = held.shape
    flat = chosen + torch.arange(0, H * M, M, device=chosen.device)[:, None]
    return held.reshape(H * M, D).index_select(0, flat.flatten()).view(H, -1, D)
