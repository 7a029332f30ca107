"""A decode step over clusters on a CPU: choosing clusters, and attention over them and the rest."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from sparsekv.kernels.attention.attention import attend_once
from sparsekv.kernels.attention.compiled import compiled_kernels, have_addresses, in_reach
from sparsekv.kernels.attention.types import ScoredCentroids, StepTensors
from sparsekv.kernels.clusters.best_clusters import best_clusters
from sparsekv.kernels.common.runs import expand_full_runs

if TYPE_CHECKING:
    from sparsekv.kernels.attention.compiled_step import CompiledStep


@dataclass(frozen=True)
class StepClusters(StepTensors):
    """`StepTensors` with the compiled kernel for them."""

    @cached_property
    def compiled(self) -> "CompiledStep | None":
        """The compiled kernel for these tensors; None if there is none, or it does not take their dtype or layout."""
        counted = self.counted
        wanted = [(counted.centroids, torch.float32), (counted.log_counts, torch.float32)]
        wanted += [(counted.counts, torch.int32), (self.starts, torch.int64)]
        wanted += [] if self.values is None else [(self.values, torch.float32)]
        if not have_addresses(*wanted):
            return None
        kernels = compiled_kernels("compiled_step")
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
    """One softmax over the rows of `best_clusters`, exact rows and, with `replace`, centroids for all other rows.

    In float32 a compiled kernel is used where numba is installed: it reads rows in place, and returns the same result
    in every run with the same number of torch threads.

    Args:
        query: [H, G, D].
        rows: keys and values [H, M, D], where each cluster is one run; a head's rows are contiguous, heads need not be.
        exact: keys and values [H, E, D] that are always attended, with the same layout.
        budget: tokens to choose in each head, at most as many as it has.
        replace: let centroids represent the tokens that are not chosen.
        sink_logits: [H, G] learned logits that take part in the softmax and carry no value.

    Returns:
        [H, G, D] in the query's dtype.
    """
    compiled = clusters.compiled
    if compiled is not None and in_reach(query, *rows, *exact):
        sinks = None if sink_logits is None else sink_logits.float().contiguous()
        return compiled.attend(query.contiguous(), rows, exact, budget, replace, sinks)
    return attend_to_best_reference(query, clusters, rows, exact, budget, replace=replace, sink_logits=sink_logits)


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
        # These logits already include the log counts, so only the log of the share left is added.
        stand_ins = [ScoredCentroids(best.logits, share, clusters.values)]
    return attend_once(query, ((picked[0], picked[1]), exact), stand_ins, *how, sink_logits)


def _picked(held: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Rows [H, R, D]: those of [H, M, D] with indices [H, R]."""
    H, M, D = held.shape
    flat = chosen + torch.arange(0, H * M, M, device=chosen.device)[:, None]
    return held.reshape(H * M, D).index_select(0, flat.flatten()).view(H, -1, D)
