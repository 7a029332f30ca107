"""Decode steps on a CPU in one kernel, over clusters or product codes, and the search for kernels that numba
compiles."""

import ctypes
import importlib
import time
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from sparsekv.kernels.attention.attention import attend_once
from sparsekv.kernels.attention.types import CodeTensors, ScoredCentroids, StepTensors
from sparsekv.kernels.clusters.cluster_choice import best_clusters
from sparsekv.kernels.common.runs import expand_full_runs

if TYPE_CHECKING:
    from sparsekv.kernels.attention.compiled_code_step import CompiledCodeStep
    from sparsekv.kernels.attention.compiled_step import CompiledStep


_took: list[float] = []


@lru_cache
def compiled_kernels(name: str) -> ModuleType | None:
    """A module of this folder that numba compiles, which takes seconds the first time and is read from disk later; None
    without numba, or where the process has no GNU OpenMP, whose threads torch uses."""
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return None
    started = time.perf_counter()
    try:
        found = importlib.import_module(f"sparsekv.kernels.attention.{name}")
    except ImportError:
        return None
    if not found.STEP.cache_hits:
        _took.append(time.perf_counter() - started)
    return found


def compiling_took() -> float:
    """Seconds since the last call in which kernels were compiled; 0 where they were read from disk."""
    seconds = sum(_took)
    _took.clear()
    return seconds


def have_addresses(*wanted: tuple[torch.Tensor, torch.dtype]) -> bool:
    """Whether tensors have the dtypes that are wanted, lie on the CPU, and are contiguous."""
    return all(tensor.dtype == dtype and tensor.is_contiguous() and tensor.is_cpu for tensor, dtype in wanted)


def in_reach(query: torch.Tensor, *rows: torch.Tensor) -> bool:
    """Whether a query and rows [H, T, D] are float32, of which a head's are contiguous, and no gradient is wanted."""
    if query.dtype != torch.float32 or query.requires_grad:
        return False
    D = query.shape[2]
    return all(held.dtype == torch.float32 and held.stride()[1:] == (D, 1) for held in rows)


@dataclass(frozen=True)
class StepCodes(CodeTensors):
    """`CodeTensors` with the compiled kernel for them."""

    @cached_property
    def compiled(self) -> "CompiledCodeStep | None":
        """The compiled kernel for these tensors; None if there is none, or it does not take their dtype or layout."""
        wide = self.turn, self.books, self.centroids, self.masses, self.values
        wanted = [(tensor, torch.float32) for tensor in wide]
        wanted += [(self.codes, torch.uint8), (self.labels, torch.int32), (self.counts, torch.int32)]
        if not have_addresses(*wanted):
            return None
        kernels = compiled_kernels("compiled_code_step")
        return None if kernels is None else kernels.CompiledCodeStep(self)


def attend_by_codes(
    query: torch.Tensor,
    codes: StepCodes,
    rows: tuple[torch.Tensor, torch.Tensor],
    exact: tuple[torch.Tensor, torch.Tensor],
    budget: int,
    *,
    replace: bool,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """One softmax over the rows of highest score, exact rows and, with `replace`, centroids for all other rows; None
    where no compiled kernel takes all of these.

    A row's score is its probability by its code, the mean over the group: exp(logit - total), where the logit is the
    sum over the parts of the turned query's products with the centroids that the code names, and the total is the
    log-sum-exp of the exact rows' logits, of the clusters' logits and masses, and of the sinks. Rows whose scores
    differ by rounding, one part in 10,000, may take each other's place. A centroid's weight is that of its cluster,
    times the share of it that is not chosen.

    Args:
        query: [H, G, D].
        rows: keys and values [H, M or more, D]; a head's rows are contiguous, heads need not be.
        exact: keys and values [H, E, D] that are always attended, with the same layout.
        budget: rows to choose in each head, at least 1 and at most M.
        replace: let centroids represent the tokens that are not chosen.
        sink_logits: [H, G] learned logits that take part in both softmaxes and carry no value.

    Returns:
        [H, G, D].
    """
    compiled = codes.compiled
    if compiled is None or not in_reach(query, *rows, *exact):
        return None
    sinks = None if sink_logits is None else sink_logits.float().contiguous()
    return compiled.attend(query.contiguous(), rows, exact, budget, replace, sinks)


def choose_by_codes(query: torch.Tensor, codes: StepCodes, beside: torch.Tensor, budget: int) -> torch.Tensor | None:
    """The rows that `attend_by_codes` attends to; None where no compiled kernel takes all of these.

    Args:
        query: [H, G, D].
        beside: [H, G] log-sum-exp of the logits of what is attended beside the H heads' rows and clusters.
        budget: rows to choose in each head, at least 1 and at most M.

    Returns:
        [H, budget] int32, in order of their places.
    """
    compiled = codes.compiled
    if compiled is None or not in_reach(query):
        return None
    return compiled.choose(query.contiguous(), beside.float().contiguous(), budget)


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
    centroids = []
    if replace:
        assert clusters.values is not None
        share = best.log_share_left(counted.shares).squeeze(1)
        # These logits already include the log counts, so only the log of the share left is added.
        centroids = [ScoredCentroids(best.logits, share, clusters.values)]
    return attend_once(query, ((picked[0], picked[1]), exact), centroids, *how, sink_logits)


def _picked(held: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Rows [H, R, D]: those of [H, M, D] with indices [H, R]."""
    H, M, D = held.shape
    flat = chosen + torch.arange(0, H * M, M, device=chosen.device)[:, None]
    return held.reshape(H * M, D).index_select(0, flat.flatten()).view(H, -1, D)
