"""Decode steps on a CPU over clusters or product codes: plain-torch references, and the wrappers of numba kernels."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, update_wrapper
from typing import Any, Generic, Self, TypeVar

import torch
from torch.nn.functional import pad

from sparsekv.kernels.attention.attention import attend_once
from sparsekv.kernels.clusters.cluster_choice import CountedClusters, best_clusters
from sparsekv.kernels.codes.code_ranks import CENTROIDS
from sparsekv.kernels.common.kernel_inputs import ScoredCentroids
from sparsekv.kernels.common.on_cpu import compiled_kernels, threads_of_torch
from sparsekv.kernels.common.row_operations import expand_full_runs
from sparsekv.kernels.posting_lists.list_ranks import ExactKeys, exact_logsumexp
from sparsekv.kernels.scores.logits import attention_logits, softcapped

Pair = tuple[torch.Tensor, torch.Tensor]
LARGEST_EXPONENT = 60.0  # upper bound of a logit minus its log-sum-exp: sums of exponentials stay within float32
SPARE = 256  # exact rows for which scratch memory is allocated in advance


class CompiledStep:
    """A compiled decode step over the tensors of one layer.

    A job is the C structure of a kernel's arguments. The job holds only the addresses of the tensors, and so this
    object keeps references to the tensors.

    Args:
        kernel: the compiled module.
        tensors: contiguous tensors of the dtypes that the kernel expects; None for a missing tensor.
        sizes: the other fields of the job that are the same in every step of the layer.
    """

    def __init__(self, kernel: Any, tensors: tuple[torch.Tensor | None, ...], **sizes: float):
        self.kernel, self.tensors, self.on_threads = kernel, tensors, threads_of_torch()
        self.scratch_sizes: dict[tuple[int, ...], int] = {}
        self.job = kernel.Job(*(0 if tensor is None else tensor.data_ptr() for tensor in tensors), **sizes)

    @classmethod
    def of(
        cls, name: str, tensors: tuple[torch.Tensor | None, ...], dtypes: tuple[torch.dtype, ...], **sizes: float
    ) -> Self | None:
        """Build the compiled step of the numba module `name`.

        Return None if `compiled_kernels` does, or if a tensor has another dtype than `dtypes` gives, is not contiguous
        or is not on the CPU.
        """
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
        """Run the decode step of `attend_to_best` or `attend_by_codes` as compiled code.

        The arguments are those of the function, without the layer. All tensors are float32, except that the sink logits
        may have any dtype. The rows of a head are contiguous.
        """
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
        """Return the job, the C structure of the kernel's arguments, for a contiguous query [H, G, D].

        The layer's job is copied, because filling the thirty fields of a new structure takes ten times as long.
        """
        job, G = type(self.job).from_buffer_copy(self.job), query.shape[1]
        job.query, job.G, job.fours, job.budget = query.data_ptr(), G, -(-G // 4), budget
        return job

    def run(self, job: Any, query: torch.Tensor) -> torch.Tensor:
        """Run a query's job on all threads; return the scratch memory, which has the job's intermediate results."""
        threads = torch.get_num_threads()
        scratch = query.new_empty(self._scratch_size(job, threads))
        job.scratch = scratch.data_ptr()
        self.on_threads(self.kernel.STEP.address, ctypes.addressof(job), threads, 0)
        return scratch

    def _scratch_size(self, job: Any, threads: int) -> int:
        """Return a size of the scratch memory, in 32-bit words, that suffices for the job.

        Sizes are kept for the next steps: the size of a job with SPARE more exact rows suffices for as many steps.
        """
        key = job.G, job.budget, job.E // SPARE, threads
        size = self.scratch_sizes.get(key)
        if size is None:
            larger = type(job).from_buffer_copy(job)
            larger.E = (key[2] + 1) * SPARE
            size = self.scratch_sizes[key] = self.kernel.scratch_size(larger, threads)
        return size


@dataclass(frozen=True)
class StepClusters:
    """C clusters of each of H heads, with the scale and soft cap of the logits.

    `starts` [H, C] int64 are the clusters' first rows. `values` [H, C, D] are the clusters' mean values, or None if
    centroids never represent tokens.
    """

    counted: CountedClusters
    starts: torch.Tensor
    values: torch.Tensor | None
    softmax_scale: float
    softcap: float | None

    @cached_property
    def compiled(self) -> CompiledStep | None:
        """The compiled kernel over this object's tensors.

        None without numba or GNU OpenMP, or if the kernel does not support the tensors' dtypes or layouts.
        """
        counted, (H, C, D) = self.counted, self.counted.centroids.shape
        tensors = counted.centroids, counted.counts, counted.log_counts, self.starts, self.values
        dtypes = torch.float32, torch.int32, torch.float32, torch.int64, torch.float32
        sizes = {"H": H, "C": C, "D": D, "scale": self.softmax_scale, "softcap": self.softcap or 0}
        return CompiledStep.of("cluster_step_numba", tensors, dtypes, **sizes)


@dataclass(frozen=True)
class StepCodes:
    """Product codes [H, M, m] uint8 of the M keys of each of H heads, with their codebooks, and C clusters of the keys.

    `turn` [H, D, D] is the rotation: the matrix by which queries are multiplied. The products are the rotated queries,
    whose channels are split into m parts. `books` [H, m, 256 or fewer, D / m] are the codebooks, the centroids of
    each part. A key's code in a part is the index of a centroid.

    Every key belongs to one cluster, and `labels` [H, M] int32 holds the cluster's index. `centroids` [H, C, D] and
    `values` [H, C, D] represent the keys and the values of each cluster. `counts` [H, C] int32 is its number of keys.
    `masses` [H, C] are the log weights of whole clusters, which are added to the centroids' logits. `softmax_scale` and
    `softcap` apply to the logits.
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
        """The compiled kernel over this object's tensors.

        None without numba or GNU OpenMP, or if the kernel does not support the tensors' dtypes or layouts.
        """
        (H, M, parts), C, D = self.codes.shape, self.counts.shape[1], self.turn.shape[1]
        # Codebooks are padded to 256 rows: a code past the last centroid, which a malformed index may hold, must not
        # make the kernel read past the end of a codebook.
        books = pad(self.books, (0, 0, 0, CENTROIDS - self.books.shape[2]))
        tensors = self.turn, books, self.codes, self.labels, self.centroids, self.counts, self.masses, self.values
        wide, whole = torch.float32, torch.int32
        dtypes = wide, wide, torch.uint8, whole, wide, whole, wide, wide
        sizes = {"H": H, "M": M, "C": C, "D": D, "parts": parts, "size": D // parts}
        how = {"scale": self.softmax_scale, "softcap": self.softcap or 0}
        return CompiledStep.of("code_step_numba", tensors, dtypes, **sizes, **how)


def in_reach(query: torch.Tensor, *rows: torch.Tensor) -> bool:
    """Whether the compiled kernels support a query [H, G, D] and rows [H, T, D].

    The query and the rows must be float32. The rows of a head must be contiguous. The query must need no gradient.
    """
    if query.dtype != torch.float32 or query.requires_grad:
        return False
    D = query.shape[2]
    return all(held.dtype == torch.float32 and held.stride()[1:] == (D, 1) for held in rows)


Layer = TypeVar("Layer", StepClusters, StepCodes)


class FusedStep(Generic[Layer]):
    """A decode step with a plain-torch implementation, `reference`, and a compiled kernel.

    The kernel replaces the reference on float32 tensors of a supported layout, if numba and GNU OpenMP are available.
    The kernel reads rows in place. With the same number of torch threads, its result is the same in every run.
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
    """Attend to rows of the best clusters, to exact rows and, with `replace`, to centroids, in one softmax.

    `best_clusters` chooses the clusters, up to the budget. Every query attends to the exact rows: the document's first
    tokens (sinks), its last tokens (tail), and new tokens. With `replace`, centroids represent all rows that are not
    chosen. The plain-torch implementation copies the chosen rows.

    Args:
        query: [H, G, D].
        rows: keys and values [H, M, D], in which each cluster is one contiguous run of rows. The rows of a head are
            contiguous; heads may have any stride.
        exact: keys and values [H, E, D] that are always attended, with the same layout.
        budget: number of tokens to choose in each head, at most the head's number of tokens.
        replace: let centroids represent the tokens that are not chosen.
        sink_logits: [H, G] learned logits that take part in the softmax and have no value row.

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
        # These logits already include the log counts, so only the log of the share of rows not chosen is added.
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
    """Choose rows as `choose_by_codes` does; attend to these rows, to exact rows and, with `replace`, to centroids.

    The compiled step chooses in `_choose` of `code_step_numba.py`. All logits are in one softmax. Every query attends
    to the exact rows: the document's first tokens (sinks), its last tokens (tail), and new tokens. With `replace`,
    centroids represent all rows that are not chosen. A centroid's weight is the weight of its whole cluster, times the
    share of the cluster's keys that are not chosen. The plain-torch implementation copies the chosen rows, and
    allocates a float32 product for every key, part and query head.

    Args:
        query: [H, G, D].
        rows: keys and values [H, M or more, D]. The rows of a head are contiguous; heads may have any stride.
        exact: keys and values [H, E, D] that are always attended, with the same layout.
        budget: number of rows to choose in each head, from 1 to M.
        replace: let centroids represent the tokens that are not chosen.
        sink_logits: [H, G] learned logits that take part in the scores' softmax and in the attention's softmax. They
            have no value row.

    Returns:
        [H, G, D] in the query's dtype.
    """
    how = codes.softmax_scale, codes.softcap
    chosen = _choose_in_torch(
        query, codes, exact_logsumexp(query, ExactKeys(exact[0], sinks=sink_logits), *how), budget
    )
    of_each = codes.labels.gather(1, chosen).long()
    taken = torch.zeros_like(codes.counts).scatter_add_(1, of_each, torch.ones_like(of_each, dtype=torch.int32))
    log_share_left = (1 - taken / codes.counts.clamp(min=1)).log()
    logits = attention_logits(query[:, :, None], codes.centroids, *how)[:, :, 0]
    centroids = [ScoredCentroids(logits, codes.masses + log_share_left, codes.values)] if replace else []
    return attend_once(query, (_picked(rows, chosen), exact), centroids, *how, sink_logits)


def choose_by_codes(query: torch.Tensor, codes: StepCodes, beside: torch.Tensor, budget: int) -> torch.Tensor:
    """Choose the rows with the highest scores in each KV head.

    `attend_by_codes` chooses the same rows, and then attends to them. Here the compiled kernel stops after the choice,
    which is all that `CodesSelector.select` needs. A row's score is its attention probability, estimated from its code
    and averaged over the G query heads: the mean of exp(logit - total). The logit is the sum, over the parts of the
    code, of the rotated query's product with the centroid that the part selects. The logit is scaled and soft-capped.
    The total is the log-sum-exp of `beside` and of the clusters' logits plus `StepCodes.masses`. Scores are subject to
    rounding: of two rows whose scores differ by less than one part in 10,000, the wrong one may be chosen.

    Args:
        query: [H, G, D].
        beside: [H, G] log-sum-exp of all other logits of the attention's softmax, such as those of exact rows and
            sinks.
        budget: number of rows to choose in each head, from 1 to M.

    Returns:
        [H, budget] int64 row indices in ascending order.
    """
    compiled = codes.compiled if in_reach(query) else None
    if compiled is None:
        return _choose_in_torch(query, codes, beside, budget)
    query, beside, (H, M) = query.contiguous(), beside.float().contiguous(), codes.labels.shape
    job = compiled.prepare(query, budget)
    job.exact_keys, job.sinks = query.data_ptr(), beside.data_ptr()
    scratch = compiled.run(job, query)
    # `place_arrays` of the kernel places the chosen keys directly after the scores.
    return scratch.view(torch.int32)[H * M : 2 * H * M].view(H, M)[:, :budget].long()


def _choose_in_torch(query: torch.Tensor, codes: StepCodes, beside: torch.Tensor, budget: int) -> torch.Tensor:
    """Choose rows like `choose_by_codes`, in plain torch."""
    how = codes.softmax_scale, codes.softcap
    rotated = (query.float() @ codes.turn.float()).unflatten(-1, (codes.books.shape[1], -1))
    products = torch.einsum("hgpd,hpcd->hgpc", rotated, codes.books.float())
    names = codes.codes.transpose(1, 2)[:, None].long().expand(-1, query.shape[1], -1, -1)
    logits = softcapped(products.gather(-1, names).sum(2) * codes.softmax_scale, codes.softcap)
    weighed = attention_logits(query[:, :, None], codes.centroids, *how)[:, :, 0] + codes.masses[:, None]
    total = torch.logaddexp(weighed.logsumexp(-1), beside)
    scores = (logits - total[..., None]).clamp(max=LARGEST_EXPONENT).exp().mean(1)
    return scores.topk(budget, -1).indices.sort(-1).values


def _picked(rows: Pair, chosen: torch.Tensor) -> Pair:
    """Copy the rows with indices [H, R] from keys and values [H, M, D]; return keys and values [H, R, D]."""
    H, M, D = rows[0].shape
    flat = (chosen + torch.arange(0, H * M, M, device=chosen.device)[:, None]).flatten()
    keys, values = (held.reshape(H * M, D).index_select(0, flat).view(H, -1, D) for held in rows)
    return keys, values
