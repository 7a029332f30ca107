"""A compiled decode step over clusters on a CPU: choosing clusters and attending to them, in one function.

With cold caches each torch operation has to load its code again; here a step is one piece of code. It runs on torch's
own threads, because threads of another pool would wait for cores on which torch's still spin: OpenMP passes a record of
addresses, the job, to the compiled function on each thread. numba caches compiled code by the date of its source file,
so all of it is in this file.
"""

import ctypes
import math

import numpy as np
import torch
from numba import carray, cfunc, config, njit, types
from numba.extending import intrinsic

from sparsekv.kernels.attention.types import StepTensors

if config.DISABLE_JIT:
    raise ImportError("numba is told by its environment not to compile")

# Sums may be reordered, so that they are vectorised; infinities and NaN are still respected.
SUMS = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}
# A maximum may ignore NaN: the exponentials that follow bring it back.
LARGEST = SUMS | {"fastmath": {"reassoc", "nsz", "nnan"}}
NOTHING = np.float32(-np.inf)

ADDRESSES = "centroids counts log_counts starts stand_values query keys values exact_keys exact_values sinks"
SIZES = "scratch output H G D C E budget replace key_step value_step exact_key_step exact_value_step"


class Job(ctypes.Structure):
    """Addresses, sizes, strides in bytes between heads (`_step`), and scale and soft cap of the logits."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in f"{ADDRESSES} {SIZES}".split()),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


JOB = np.dtype(Job)

thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
thread_count = types.ExternalFunction("omp_get_num_threads", types.int32())
wait_for_all = types.ExternalFunction("GOMP_barrier", types.void())


@intrinsic
def _pointer(context, address, element):
    kind = types.CPointer(element.dtype)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64, element), generate


@njit(inline="always")
def _floats(address, shape):
    return carray(_pointer(address, np.float32), shape)


@njit(inline="always")
def _ints(address, shape):
    return carray(_pointer(address, np.int32), shape)


@njit(inline="always")
def _longs(address, shape):
    return carray(_pointer(address, np.int64), shape)


@njit(inline="always")
def _scores(job):
    """Scores [H, C], at the start of the scratch memory; lengths, weights, parts and sums follow them."""
    return _floats(job.scratch, (job.H, job.C))


@njit(inline="always")
def _ranks(job):
    """Bits of the scores as int32, which have the same order because no score is negative."""
    return _ints(job.scratch, (job.H, job.C))


@njit(inline="always")
def _lengths(job):
    """[H, C] number of tokens to take of each cluster."""
    return _ints(job.scratch + 4 * job.H * job.C, (job.H, job.C))


@njit(inline="always")
def _weights(job):
    """[H, G, C + budget + E] logits, later their exponentials, of clusters, chosen rows and exact rows."""
    return _floats(job.scratch + 8 * job.H * job.C, (job.H, job.G, job.C + job.budget + job.E))


@njit(inline="always")
def _parts(job, threads):
    """Each thread's partial outputs [threads, H, G, D], and their largest logits and sums [threads, H, G, 2]."""
    H, G, D = job.H, job.G, job.D
    address = job.scratch + 8 * H * job.C + 4 * H * G * (job.C + job.budget + job.E)
    return _floats(address, (threads, H, G, D)), _floats(address + 4 * threads * H * G * D, (threads, H, G, 2))


def _scratch_size(H: int, G: int, D: int, C: int, rows: int, threads: int) -> int:
    """Size of the scratch memory in 32-bit numbers."""
    return 2 * H * C + H * G * (C + rows) + threads * H * G * (D + 2)


@njit(inline="always")
def _share(before, some, everything, thread, threads):
    """Start and stop of a thread's part of `some` items after `before` others, if `everything` is split evenly."""
    start, stop = thread * everything // threads - before, (thread + 1) * everything // threads - before
    return min(max(start, 0), some), min(max(stop, 0), some)


@njit(**SUMS)
def _exp(x):
    """exp(x) for x of at most 0, within 2e-7, by a polynomial: a function call would not be vectorised."""
    x *= np.float32(1.442695041)
    x = np.float32(-127) if x < np.float32(-127) else x
    whole = np.floor(x + np.float32(0.5))
    part = x - whole
    value = np.float32(1.535336188e-4)
    value = value * part + np.float32(1.339887440e-3)
    value = value * part + np.float32(9.618437357e-3)
    value = value * part + np.float32(5.550332471e-2)
    value = value * part + np.float32(2.402264791e-1)
    value = value * part + np.float32(6.931472028e-1)
    value = value * part + np.float32(1)
    return value * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(**LARGEST)
def _largest(numbers, start, stop, most):
    for i in range(start, stop):
        most = max(most, numbers[i])
    return most


@njit(**SUMS)
def _exponents(numbers, start, stop, largest):
    """Replace numbers by the exponentials of their distance to the largest; returns their sum."""
    total = np.float32(0)
    for i in range(start, stop):
        numbers[i] = _exp(numbers[i] - largest)
        total += numbers[i]
    return total


@njit(**SUMS)
def _look_at(job, query, rows, start, stop, logits, ahead):
    """Write the logits of queries [G, D] on rows `start` to `stop` of [T, D]; row t's go to logits [:, ahead + t]."""
    for t in range(start, stop):
        for g in range(query.shape[0]):
            product = np.float32(0)
            for d in range(query.shape[1]):
                product += query[g, d] * rows[t, d]
            logits[g, ahead + t] = product * job.scale
    if job.softcap > 0:
        for g in range(query.shape[0]):
            for place in range(ahead + start, ahead + stop):
                logits[g, place] = job.softcap * np.float32(math.tanh(logits[g, place] / job.softcap))


@njit(**SUMS)
def _add(output, weights, ahead, rows, start, stop):
    """Add rows `start` to `stop` of [T, D] to outputs [G, D], row t weighted by weights [:, ahead + t]; four rows
    together, so that the outputs are read and written less often."""
    fours = stop - max(stop - start, 0) % 4
    for t in range(start, fours, 4):
        for g in range(output.shape[0]):
            place = ahead + t
            first, second, third, fourth = (
                weights[g, place], weights[g, place + 1], weights[g, place + 2], weights[g, place + 3]
            )  # fmt: skip
            for d in range(output.shape[1]):
                output[g, d] += (
                    first * rows[t, d] + second * rows[t + 1, d] + third * rows[t + 2, d] + fourth * rows[t + 3, d]
                )
    for t in range(fours, stop):
        for g in range(output.shape[0]):
            weight = weights[g, ahead + t]
            for d in range(output.shape[1]):
                output[g, d] += weight * rows[t, d]


@njit(inline="always")
def _score(logits, log_counts, counts, scores):
    """Write S_i of one head [C], summed over the group; adds the log counts to its logits [G, ...]."""
    C = len(counts)
    for c in range(C):
        scores[c] = 0
    for g in range(logits.shape[0]):
        for c in range(C):
            logits[g, c] += log_counts[c]
        largest, total = _largest(logits[g], np.int64(0), C, NOTHING), np.float32(0)
        for c in range(C):
            total += _exp(logits[g, c] - largest)
        share = np.float32(1) / total
        for c in range(C):
            scores[c] += share * _exp(logits[g, c] - largest)
    for c in range(C):
        scores[c] /= max(np.float32(counts[c]), np.float32(1))


@njit(inline="always")
def _last_score(ranks, counts, budget):
    """The highest rank for which clusters of that rank or above have `budget` tokens or more, found bit by bit."""
    last = np.int32(0)
    for bit in range(30, -1, -1):
        tried, held = np.int32(last | (1 << bit)), np.int32(0)
        for c in range(len(counts)):
            held += counts[c] if ranks[c] >= tried else np.int32(0)
        last = tried if held >= budget else last
    return last


@njit(inline="always")
def _fill(ranks, counts, budget, lengths):
    """Write the tokens to take: whole clusters above the last score, then clusters with that score in order."""
    last, left = _last_score(ranks, counts, budget), np.int32(budget)
    for c in range(len(counts)):
        lengths[c] = counts[c] if ranks[c] > last else np.int32(0)
        left -= lengths[c]
    for c in range(len(counts)):
        if max(ranks[c], 0) == last:
            lengths[c] = min(left, counts[c])
            left -= lengths[c]


@njit(inline="always")
def _choose(job, thread, threads):
    H, G, D, C = job.H, job.G, job.D, job.C
    query, centroids = _floats(job.query, (H, G, D)), _floats(job.centroids, (H, C, D))
    counts, log_counts = _ints(job.counts, (H, C)), _floats(job.log_counts, (H, C))
    weights, scores, ranks, lengths = _weights(job), _scores(job), _ranks(job), _lengths(job)
    for h in range(H):
        start, stop = _share(h * C, C, H * C, thread, threads)
        _look_at(job, query[h], centroids[h], start, stop, weights[h], np.int64(0))
    wait_for_all()
    for h in range(thread, H, threads):
        _score(weights[h], log_counts[h], counts[h], scores[h])
        _fill(ranks[h], counts[h], job.budget, lengths[h])
        for c in range(C):
            # A centroid represents the tokens that are not taken: none of a cluster that is taken whole.
            if lengths[h, c] > 0:
                share = math.log(np.float32(counts[h, c] - lengths[h, c]) / np.float32(counts[h, c]))
                for g in range(G):
                    weights[h, g, c] += share


@njit(inline="always")
def _attend(job, thread, threads):
    """Attend to a thread's share of all heads' rows and centroids: partial outputs, with largest logits and sums."""
    H, G, D, C, each = job.H, job.G, job.D, job.C, job.budget + job.E
    query, starts = _floats(job.query, (H, G, D)), _longs(job.starts, (H, C))
    weights, lengths, (parts, sums) = _weights(job), _lengths(job), _parts(job, threads)
    for h in range(H):
        for g in range(G):
            sums[thread, h, g, 0], sums[thread, h, g, 1] = NOTHING, 0
            for d in range(D):
                parts[thread, h, g, d] = 0
        start, stop = _share(h * each, each, H * each, thread, threads)
        first, last = _share(h * C, C, H * C, thread, threads) if job.replace else (0, 0)
        if start < stop or first < last:
            pieces = start, stop, first, last
            _attend_head(job, h, query[h], lengths[h], starts[h], weights[h], parts[thread, h], sums[thread, h], pieces)


@njit(inline="always")
def _attend_head(job, h, query, lengths, starts, weights, part, sums, pieces):
    """A thread's rows and centroids of one head: logits, which follow those of the clusters, then weighted values."""
    (start, stop, first, last), G, D, C, E = pieces, job.G, job.D, job.C, job.E
    keys, values = _floats(job.keys + h * job.key_step, (1, D)), _floats(job.values + h * job.value_step, (1, D))
    exact_keys = _floats(job.exact_keys + h * job.exact_key_step, (E, D))
    exact_values = _floats(job.exact_values + h * job.exact_value_step, (E, D))
    begin = 0
    for c in range(C):
        if lengths[c] > 0:
            low, high, ahead = max(start, begin), min(stop, begin + lengths[c]), begin - starts[c]
            _look_at(job, query, keys, low - ahead, high - ahead, weights, C + ahead)
            begin += lengths[c]
    always = C + job.budget
    first_exact, last_exact = max(start - job.budget, 0), stop - job.budget
    _look_at(job, query, exact_keys, first_exact, last_exact, weights, always)
    for g in range(G):
        largest = _largest(weights[g], C + start, C + stop, _largest(weights[g], first, last, NOTHING))
        sums[g, 0], largest = largest, np.float32(0) if largest == NOTHING else largest
        sums[g, 1] = _exponents(weights[g], C + start, C + stop, largest)
        sums[g, 1] += _exponents(weights[g], first, last, largest)
    begin = 0
    for c in range(C):
        if lengths[c] > 0:
            low, high, ahead = max(start, begin), min(stop, begin + lengths[c]), begin - starts[c]
            _add(part, weights, C + ahead, values, low - ahead, high - ahead)
            begin += lengths[c]
    _add(part, weights, always, exact_values, first_exact, last_exact)
    _add(part, weights, np.int64(0), _floats(job.stand_values, (job.H, C, D))[h], first, last)


@njit(inline="always")
def _join(job, threads):
    """Merge the partial outputs of each head, and its sink logit."""
    H, G, D = job.H, job.G, job.D
    (parts, sums), output = _parts(job, threads), _floats(job.output, (H, G, D))
    for h in range(H):
        for g in range(G):
            sink = _floats(job.sinks, (H, G))[h, g] if job.sinks else NOTHING
            largest = sink
            for thread in range(threads):
                largest = max(largest, sums[thread, h, g, 0])
            total = _exp(sink - largest)
            for d in range(D):
                output[h, g, d] = 0
            for thread in range(threads):
                weight = _exp(sums[thread, h, g, 0] - largest)
                total += weight * sums[thread, h, g, 1]
                for d in range(D):
                    output[h, g, d] += weight * parts[thread, h, g, d]
            for d in range(D):
                output[h, g, d] /= total


def _step(job):
    one, thread, threads = carray(job, 1, JOB)[0], np.int64(thread_number()), np.int64(thread_count())
    _choose(one, thread, threads)
    wait_for_all()
    _attend(one, thread, threads)
    wait_for_all()
    if thread == 0:
        _join(one, threads)


def _compiled():
    """The function that threads call; cached on disk where that is possible."""
    signature = types.void(types.voidptr)
    try:
        return cfunc(signature, cache=True, **SUMS)(_step)
    except RuntimeError:  # numba has no cache folder that it can write to
        return cfunc(signature, **SUMS)(_step)


# A global, because the machine code is freed with it.
STEP = _compiled()
_parallel = ctypes.CDLL(None).GOMP_parallel
_parallel.argtypes, _parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None


class CompiledStep:
    """The compiled step over one layer's clusters; keeps their tensors, because the job has only their addresses.

    Args:
        clusters: float32 and contiguous, counts int32, starts int64.
    """

    def __init__(self, clusters: StepTensors):
        counted = clusters.counted
        self.clusters, (H, C, D) = clusters, counted.centroids.shape
        tensors = counted.centroids, counted.counts, counted.log_counts, clusters.starts, clusters.values
        self.job = Job(
            *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
            H=H,
            C=C,
            D=D,
            scale=clusters.softmax_scale,
            softcap=clusters.softcap or 0,
        )

    def attend(
        self,
        query: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor],
        exact: tuple[torch.Tensor, torch.Tensor],
        budget: int,
        replace: bool,
        sink_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `attend_to_best`; float32, all contiguous except between the heads of rows.

        Copies the prepared job and sets what is new: making a job of thirty numbers takes ten times as long.
        """
        job, (H, G, D), threads = Job.from_buffer_copy(self.job), query.shape, torch.get_num_threads()
        (keys, values), (exact_keys, exact_values) = rows, exact
        E = exact_keys.shape[1]
        scratch = query.new_empty(_scratch_size(H, G, D, job.C, budget + E, threads))
        output = query.new_empty(H, G, D)
        job.G, job.E, job.budget, job.replace = G, E, budget, replace
        job.query, job.scratch, job.output = query.data_ptr(), scratch.data_ptr(), output.data_ptr()
        job.keys, job.values = keys.data_ptr(), values.data_ptr()
        job.exact_keys, job.exact_values = exact_keys.data_ptr(), exact_values.data_ptr()
        job.key_step, job.value_step = 4 * keys.stride(0), 4 * values.stride(0)
        job.exact_key_step, job.exact_value_step = 4 * exact_keys.stride(0), 4 * exact_values.stride(0)
        if sink_logits is not None:
            job.sinks = sink_logits.data_ptr()
        _parallel(STEP.address, ctypes.addressof(job), threads, 0)
        return output
