"""Decode steps on a CPU over clusters or product codes: definitions in plain torch, and the kernels that numba compiles
of them."""

import ctypes
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, update_wrapper
from types import ModuleType
from typing import Any, Generic, Self, TypeVar

import torch
from torch.nn.functional import pad

from sparsekv.kernels.attention.attention import attend_once
from sparsekv.kernels.attention.types import ScoredCentroids
from sparsekv.kernels.clusters.cluster_choice import CountedClusters, best_clusters
from sparsekv.kernels.codes.types import CENTROIDS
from sparsekv.kernels.common.runs import expand_full_runs
from sparsekv.kernels.posting_lists.list_ranks import exact_logsumexp
from sparsekv.kernels.posting_lists.types import ExactKeys
from sparsekv.kernels.scores.logits import attention_logits, softcapped

Pair = tuple[torch.Tensor, torch.Tensor]
MOST = 60.0  # of a logit above its log-sum-exp: its exponential, summed, is a float32
_took: list[float] = []


@lru_cache
def _parallel() -> Any:
    """GNU OpenMP's call that has all of torch's threads run a function; None where the process has no such threads."""
    call = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if call is not None:
        call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return call


@lru_cache
def compiled_kernels(name: str) -> ModuleType | None:
    """A module of this folder that numba compiles, which takes seconds the first time and is read from disk later; None
    without numba or those threads."""
    if _parallel() is None:
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


class CompiledStep:
    """The compiled step over one layer's tensors, which it keeps, because the job has only their addresses.

    Args:
        kernel: the module that is compiled.
        tensors: float32 and contiguous, or of the integers that the job's type names; None: missing.
        sizes: the job's other fields that are the layer's.
    """

    def __init__(self, kernel: Any, tensors: tuple[torch.Tensor | None, ...], **sizes: float):
        self.kernel, self.tensors, self.on_threads = kernel, tensors, _parallel()
        self.job = kernel.Job(*(0 if tensor is None else tensor.data_ptr() for tensor in tensors), **sizes)

    @classmethod
    def of(
        cls, name: str, tensors: tuple[torch.Tensor | None, ...], dtypes: tuple[torch.dtype, ...], **sizes: float
    ) -> Self | None:
        """The step of a module that numba compiles; None where there is no numba, or where a tensor has another dtype,
        is not contiguous or not on the CPU."""
        there = [(tensor, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True) if tensor is not None]
        if not all(tensor.dtype == dtype and tensor.is_contiguous() and tensor.is_cpu for tensor, dtype in there):
            return None
        kernel = compiled_kernels(name)
        return None if kernel is None else cls(kernel, tensors, **sizes)

    def attend(
        self,
        query: torch.Tensor,
        rows: Pair,
        exact: Pair,
        budget: int,
        *,
        replace: bool,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Choose and attend; float32, a head's rows contiguous."""
        query, (keys, values), (exact_keys, exact_values) = query.contiguous(), rows, exact
        sinks, output = None if sink_logits is None else sink_logits.float().contiguous(), torch.empty_like(query)
        job = self.prepare(query, budget)
        job.E, job.replace, job.output = exact_keys.shape[1], replace, output.data_ptr()
        job.keys, job.values = keys.data_ptr(), values.data_ptr()
        job.exact_keys, job.exact_values = exact_keys.data_ptr(), exact_values.data_ptr()
        job.key_step, job.value_step = 4 * keys.stride(0), 4 * values.stride(0)
        job.exact_key_step, job.exact_value_step = 4 * exact_keys.stride(0), 4 * exact_values.stride(0)
        if sinks is not None:
            job.sinks = sinks.data_ptr()
        self.run(job, query)
        return output

    def prepare(self, query: torch.Tensor, budget: int) -> Any:
        """A job for a contiguous query [H, G, D]: a copy, as to make one of thirty numbers takes ten times as long."""
        job, G = type(self.job).from_buffer_copy(self.job), query.shape[1]
        job.query, job.G, job.fours, job.budget = query.data_ptr(), G, -(-G // 4), budget
        return job

    def run(self, job: Any, query: torch.Tensor) -> torch.Tensor:
        """Do a query's job; returns its scratch memory."""
        threads = torch.get_num_threads()
        scratch = query.new_empty(self.kernel.scratch_size(job, threads))
        job.scratch = scratch.data_ptr()
        self.on_threads(self.kernel.STEP.address, ctypes.addressof(job), threads, 0)
        return scratch


@dataclass(frozen=True)
class StepClusters:
    """C clusters of each of H heads: starts [H, C] int64 are their first rows, values [H, C, D] the centroids that can
    represent tokens which are not chosen (None: there are none); and the scale and soft cap of logits."""

    counted: CountedClusters
    starts: torch.Tensor
    values: torch.Tensor | None
    softmax_scale: float
    softcap: float | None

    @cached_property
    def compiled(self) -> CompiledStep | None:
        """The compiled kernel for these tensors; None if there is none, or it does not take their dtype or layout."""
        counted, (H, C, D) = self.counted, self.counted.centroids.shape
        tensors = counted.centroids, counted.counts, counted.log_counts, self.starts, self.values
        dtypes = torch.float32, torch.int32, torch.float32, torch.int64, torch.float32
        sizes = {"H": H, "C": C, "D": D, "scale": self.softmax_scale, "softcap": self.softcap or 0}
        return CompiledStep.of("cluster_step_numba", tensors, dtypes, **sizes)


@dataclass(frozen=True)
class StepCodes:
    """Codes [H, M, m] uint8 of the keys of each of H heads, what they name, and C clusters, every key in one.

    turn [H, D, D], by which queries are multiplied; books [H, m, 256 or fewer, D / m], centroids of m parts of the
    turned channels; labels [H, M] int32, each key's cluster. Of the clusters: centroids [H, C, D], counts [H, C] int32
    of keys, masses [H, C] that are added to a logit where it stands for all keys of a cluster, and values [H, C, D].
    And the scale and soft cap of logits.
    """

    turn: torch.Tensor
    books: torch.Tensor
    codes: torch.Tensor
    labels: torch.Tensor
    centroids: torch.Tensor
    counts: torch.Tensor
    masses: torch.Tensor
    values: torch.Tensor
    softmax_scale: float
    softcap: float | None

    @cached_property
    def compiled(self) -> CompiledStep | None:
        """The compiled kernel for these tensors; None if there is none, or it does not take their dtype or layout."""
        (H, M, parts), C, D = self.codes.shape, self.counts.shape[1], self.turn.shape[1]
        # A byte that names no centroid is an index that someone made: its row is there to be read.
        books = pad(self.books, (0, 0, 0, CENTROIDS - self.books.shape[2]))
        tensors = self.turn, books, self.codes, self.labels, self.centroids, self.counts, self.masses, self.values
        wide, whole = torch.float32, torch.int32
        dtypes = wide, wide, torch.uint8, whole, wide, whole, wide, wide
        sizes = {"H": H, "M": M, "C": C, "D": D, "parts": parts, "size": D // parts}
        how = {"scale": self.softmax_scale, "softcap": self.softcap or 0}
        return CompiledStep.of("code_step_numba", tensors, dtypes, **sizes, **how)


def in_reach(query: torch.Tensor, *rows: torch.Tensor) -> bool:
    """Whether a query and rows [H, T, D] are float32, of which a head's are contiguous, and no gradient is wanted."""
    if query.dtype != torch.float32 or query.requires_grad:
        return False
    D = query.shape[2]
    return all(held.dtype == torch.float32 and held.stride()[1:] == (D, 1) for held in rows)


Layer = TypeVar("Layer", StepClusters, StepCodes)


class FusedStep(Generic[Layer]):
    """A decode step in plain torch, `reference`, and its compiled kernel, which runs instead on tensors that it takes.

    That is in float32, with numba installed. The kernel reads rows in place, and returns the same result in every run
    with the same number of torch threads.
    """

    def __init__(self, reference: Callable[..., torch.Tensor]):
        update_wrapper(self, reference)
        self.reference = reference

    def __call__(
        self,
        query: torch.Tensor,
        layer: Layer,
        rows: Pair,
        exact: Pair,
        budget: int,
        *,
        replace: bool,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        compiled = layer.compiled if in_reach(query, *rows, *exact) else None
        if compiled is None:
            return self.reference(query, layer, rows, exact, budget, replace=replace, sink_logits=sink_logits)
        return compiled.attend(query, rows, exact, budget, replace=replace, sink_logits=sink_logits)


@FusedStep[StepClusters]
def attend_to_best(
    query: torch.Tensor,
    clusters: StepClusters,
    rows: Pair,
    exact: Pair,
    budget: int,
    *,
    replace: bool,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """One softmax over the rows of `best_clusters`, exact rows and, with `replace`, centroids for all other rows.

    In plain torch it gathers the rows.

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
    counted, how = clusters.counted, (clusters.softmax_scale, clusters.softcap)
    best = best_clusters(query, counted, budget, *how)
    chosen = expand_full_runs(clusters.starts.gather(1, best.clusters), best.lengths, budget)
    centroids = []
    if replace:
        assert clusters.values is not None
        share = best.log_share_left(counted.shares).squeeze(1)
        # These logits already include the log counts, so only the log of the share left is added.
        centroids = [ScoredCentroids(best.logits, share, clusters.values)]
    return attend_once(query, (_picked(rows, chosen), exact), centroids, *how, sink_logits)


@FusedStep[StepCodes]
def attend_by_codes(
    query: torch.Tensor,
    codes: StepCodes,
    rows: Pair,
    exact: Pair,
    budget: int,
    *,
    replace: bool,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """One softmax over the rows of `choose_by_codes`, exact rows and, with `replace`, centroids for all other rows.

    A centroid's weight is that of its cluster, times the share of it that is not chosen. In plain torch it gathers the
    rows, and what all codes name.

    Args:
        query: [H, G, D].
        rows: keys and values [H, M or more, D]; a head's rows are contiguous, heads need not be.
        exact: keys and values [H, E, D] that are always attended, with the same layout.
        budget: rows to choose in each head, at least 1 and at most M.
        replace: let centroids represent the tokens that are not chosen.
        sink_logits: [H, G] learned logits that take part in both softmaxes and carry no value.

    Returns:
        [H, G, D] in the query's dtype.
    """
    how = codes.softmax_scale, codes.softcap
    chosen = _best_by_codes(query, codes, exact_logsumexp(query, ExactKeys(exact[0], sinks=sink_logits), *how), budget)
    of_each = codes.labels.gather(1, chosen).long()
    taken = torch.zeros_like(codes.counts).scatter_add_(1, of_each, torch.ones_like(of_each, dtype=torch.int32))
    log_share_left = (1 - taken / codes.counts.clamp(min=1)).log()
    logits = attention_logits(query[:, :, None], codes.centroids, *how)[:, :, 0]
    centroids = [ScoredCentroids(logits, codes.masses + log_share_left, codes.values)] if replace else []
    return attend_once(query, (_picked(rows, chosen), exact), centroids, *how, sink_logits)


def choose_by_codes(query: torch.Tensor, codes: StepCodes, beside: torch.Tensor, budget: int) -> torch.Tensor:
    """The rows of highest score in each head.

    A row's score is its probability by its code, the mean over the group: exp(logit - total), where the logit is the
    sum over the parts of the turned query's products with the centroids that the code names, and the total is the
    log-sum-exp of `beside` and of the clusters' logits and masses. Rows whose scores differ by rounding, one part in
    10,000, may take each other's place.

    Args:
        query: [H, G, D].
        beside: [H, G] log-sum-exp of the logits of what is attended beside the H heads' rows and clusters.
        budget: rows to choose in each head, at least 1 and at most M.

    Returns:
        [H, budget] int64, in order of their places.
    """
    compiled = codes.compiled if in_reach(query) else None
    if compiled is None:
        return _best_by_codes(query, codes, beside, budget)
    query, beside, (H, M) = query.contiguous(), beside.float().contiguous(), codes.labels.shape
    job = compiled.prepare(query, budget)
    job.exact_keys, job.sinks = query.data_ptr(), beside.data_ptr()
    scratch = compiled.run(job, query)
    # As `lay_out` has it: the keys that are found come after the scores.
    return scratch.view(torch.int32)[H * M : 2 * H * M].view(H, M)[:, :budget].long()


def _best_by_codes(query: torch.Tensor, codes: StepCodes, beside: torch.Tensor, budget: int) -> torch.Tensor:
    """`choose_by_codes` in plain torch."""
    how = codes.softmax_scale, codes.softcap
    turned = (query.float() @ codes.turn.float()).unflatten(-1, (codes.books.shape[1], -1))
    products = torch.einsum("hgpd,hpcd->hgpc", turned, codes.books.float())
    names = codes.codes.transpose(1, 2)[:, None].long().expand(-1, query.shape[1], -1, -1)
    logits = softcapped(products.gather(-1, names).sum(2) * codes.softmax_scale, codes.softcap)
    weighed = attention_logits(query[:, :, None], codes.centroids, *how)[:, :, 0] + codes.masses[:, None]
    total = torch.logaddexp(weighed.logsumexp(-1), beside)
    scores = (logits - total[..., None]).clamp(max=MOST).exp().mean(1)
    return scores.topk(budget, -1).indices.sort(-1).values


def _picked(rows: Pair, chosen: torch.Tensor) -> Pair:
    """Rows [H, R, D] of keys and values: those of [H, M, D] with indices [H, R]."""
    H, M, D = rows[0].shape
    flat = (chosen + torch.arange(0, H * M, M, device=chosen.device)[:, None]).flatten()
    keys, values = (held.reshape(H * M, D).index_select(0, flat).view(H, -1, D) for held in rows)
    return keys, values
