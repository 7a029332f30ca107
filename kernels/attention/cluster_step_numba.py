"""A compiled decode step over clusters on a CPU: choosing clusters and attending to them, in one function.

With cold caches each torch operation has to load its code again; here a step is one piece of code. It runs on torch's
own threads, because threads of another pool would wait for cores on which torch's still spin: OpenMP passes a record of
addresses, the job, to the compiled function on each thread.
"""

import ctypes
import math
import zlib
from pathlib import Path

import numpy as np
from numba import carray, cfunc, config, njit, types

from sparsekv.kernels.attention.step_memory_numba import (
    JOB,
    Job,
    floats,
    ints,
    lengths_of,
    longs,
    parts_of,
    ranks_of,
    scores_of,
    weights_of,
)
from sparsekv.kernels.attention.step_rows_numba import (
    NOTHING,
    SUMS,
    add_rows,
    exp_of,
    exponents,
    largest_of,
    write_logits,
)

if config.DISABLE_JIT:
    raise ImportError("numba is told by its environment not to compile")

thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
thread_count = types.ExternalFunction("omp_get_num_threads", types.int32())
wait_for_all = types.ExternalFunction("GOMP_barrier", types.void())


@njit(inline="always")
def _share(before, some, everything, thread, threads):
    """Start and stop of a thread's part of `some` items after `before` others, if `everything` is split evenly."""
    start, stop = thread * everything // threads - before, (thread + 1) * everything // threads - before
    return min(max(start, 0), some), min(max(stop, 0), some)


@njit(inline="always")
def _score(logits, log_counts, counts, scores):
    """Write S_i of one head [C], summed over the group; adds the log counts to its logits [G, ...]."""
    C = len(counts)
    for c in range(C):
        scores[c] = 0
    for g in range(logits.shape[0]):
        for c in range(C):
            logits[g, c] += log_counts[c]
        largest, total = largest_of(logits[g], np.int64(0), C, NOTHING), np.float32(0)
        for c in range(C):
            total += exp_of(logits[g, c] - largest)
        share = np.float32(1) / total
        for c in range(C):
            scores[c] += share * exp_of(logits[g, c] - largest)
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
    query, centroids = floats(job.query, (H, G, D)), floats(job.centroids, (H, C, D))
    counts, log_counts = ints(job.counts, (H, C)), floats(job.log_counts, (H, C))
    weights, scores, ranks, lengths = weights_of(job), scores_of(job), ranks_of(job), lengths_of(job)
    for h in range(H):
        start, stop = _share(h * C, C, H * C, thread, threads)
        write_logits(job, query[h], centroids[h], start, stop, weights[h], np.int64(0))
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
    query, starts = floats(job.query, (H, G, D)), longs(job.starts, (H, C))
    weights, lengths, (parts, sums) = weights_of(job), lengths_of(job), parts_of(job, threads)
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
    keys, values = floats(job.keys + h * job.key_step, (1, D)), floats(job.values + h * job.value_step, (1, D))
    exact_keys = floats(job.exact_keys + h * job.exact_key_step, (E, D))
    exact_values = floats(job.exact_values + h * job.exact_value_step, (E, D))
    begin = 0
    for c in range(C):
        if lengths[c] > 0:
            low, high, ahead = max(start, begin), min(stop, begin + lengths[c]), begin - starts[c]
            write_logits(job, query, keys, low - ahead, high - ahead, weights, C + ahead)
            begin += lengths[c]
    always = C + job.budget
    first_exact, last_exact = max(start - job.budget, 0), stop - job.budget
    write_logits(job, query, exact_keys, first_exact, last_exact, weights, always)
    for g in range(G):
        largest = largest_of(weights[g], C + start, C + stop, largest_of(weights[g], first, last, NOTHING))
        sums[g, 0], largest = largest, np.float32(0) if largest == NOTHING else largest
        sums[g, 1] = exponents(weights[g], C + start, C + stop, largest)
        sums[g, 1] += exponents(weights[g], first, last, largest)
    begin = 0
    for c in range(C):
        if lengths[c] > 0:
            low, high, ahead = max(start, begin), min(stop, begin + lengths[c]), begin - starts[c]
            add_rows(part, weights, C + ahead, values, low - ahead, high - ahead)
            begin += lengths[c]
    add_rows(part, weights, always, exact_values, first_exact, last_exact)
    add_rows(part, weights, np.int64(0), floats(job.stand_values, (job.H, C, D))[h], first, last)


@njit(inline="always")
def _join(job, threads):
    """Merge the partial outputs of each head, and its sink logit."""
    H, G, D = job.H, job.G, job.D
    (parts, sums), output = parts_of(job, threads), floats(job.output, (H, G, D))
    for h in range(H):
        for g in range(G):
            sink = floats(job.sinks, (H, G))[h, g] if job.sinks else NOTHING
            largest = sink
            for thread in range(threads):
                largest = max(largest, sums[thread, h, g, 0])
            total = exp_of(sink - largest)
            for d in range(D):
                output[h, g, d] = 0
            for thread in range(threads):
                weight = exp_of(sums[thread, h, g, 0] - largest)
                total += weight * sums[thread, h, g, 1]
                for d in range(D):
                    output[h, g, d] += weight * parts[thread, h, g, d]
            for d in range(D):
                output[h, g, d] /= total


def sources(folder: Path) -> int:
    """Checksum of the compiled files of a folder."""
    checksum = 0
    for path in sorted(folder.glob("*_numba.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return checksum


def _step(version):
    """What each thread runs; numba caches it by the date of this file and by what it closes over.

    The functions that it calls are compiled into it, also those of other files: `version` stands for all of them.
    """

    def step(job):
        _ = version
        one, thread, threads = carray(job, 1, JOB)[0], np.int64(thread_number()), np.int64(thread_count())
        _choose(one, thread, threads)
        wait_for_all()
        _attend(one, thread, threads)
        wait_for_all()
        if thread == 0:
            _join(one, threads)

    return step


def _compiled():
    """The function that threads call; cached on disk where that is possible."""
    signature, step = types.void(types.voidptr), _step(sources(Path(__file__).parent))
    try:
        return cfunc(signature, cache=True, **SUMS)(step)
    except RuntimeError:  # numba has no cache folder that it can write to
        return cfunc(signature, **SUMS)(step)


# A global, because the machine code is freed with it.
STEP = _compiled()
_parallel = ctypes.CDLL(None).GOMP_parallel
_parallel.argtypes, _parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None


def run_step(job: Job, threads: int) -> None:
    """Do a job on so many of torch's threads."""
    _parallel(STEP.address, ctypes.addressof(job), threads, 0)
