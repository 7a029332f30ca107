"""A compiled decode step over clusters on a CPU: choosing clusters and attending to them, in one function.

With cold caches each torch operation has to load its code again; here a step is one piece of code.
"""

import math

import numpy as np
from numba import carray, njit

from sparsekv.kernels.attention.lanes_numba import NOTHING, add_rows, exp_of, largest_of, write_logits
from sparsekv.kernels.attention.step_memory_numba import (
    JOB,
    VERSION,
    clear,
    compiled,
    floats,
    ints,
    join,
    lengths_of,
    longs,
    parts_of,
    ranks_of,
    scores_of,
    share_of,
    thread_count,
    thread_number,
    to_weights,
    wait_for_all,
    weights_of,
)


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
        start, stop = share_of(h * C, C, H * C, thread, threads)
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
    clear(parts[thread], sums[thread])
    for h in range(H):
        start, stop = share_of(h * each, each, H * each, thread, threads)
        first, last = share_of(h * C, C, H * C, thread, threads) if job.replace else (0, 0)
        if start < stop or first < last:
            pieces = start, stop, first, last
            _attend_head(job, h, query[h], lengths[h], starts[h], weights[h], parts[thread, h], sums[thread, h], pieces)


@njit(inline="always")
def _attend_head(job, h, query, lengths, starts, weights, part, sums, pieces):
    """A thread's rows and centroids of one head: logits, which follow those of the clusters, then weighted values."""
    (start, stop, first, last), D, C, E = pieces, job.D, job.C, job.E
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
    to_weights(weights, sums, C + start, C + stop, first, last)
    begin = 0
    for c in range(C):
        if lengths[c] > 0:
            low, high, ahead = max(start, begin), min(stop, begin + lengths[c]), begin - starts[c]
            add_rows(part, weights, C + ahead, values, low - ahead, high - ahead)
            begin += lengths[c]
    add_rows(part, weights, always, exact_values, first_exact, last_exact)
    add_rows(part, weights, np.int64(0), floats(job.stand_values, (job.H, C, D))[h], first, last)


def _step(version):
    """See `VERSION`."""

    def step(job):
        _ = version
        one, thread, threads = carray(job, 1, JOB)[0], np.int64(thread_number()), np.int64(thread_count())
        _choose(one, thread, threads)
        wait_for_all()
        _attend(one, thread, threads)
        wait_for_all()
        if thread == 0:
            parts, sums = parts_of(one, threads)
            join(one, parts, sums)

    return step


# A global, because the machine code is freed with it.
STEP = compiled(_step(VERSION))
