"""Compiled decode step over clusters on a CPU: one function chooses clusters and attends to them.

With cold CPU caches, every torch operation loads its code from memory again. Here a step is a single function.
"""

import math
from typing import Any

import numpy as np
from numba import carray, njit

from sparsekv.kernels.attention.compiled_step_numba import (
    NOTHING,
    VERSION,
    add_rows,
    clear,
    compiled,
    exp_of,
    floats,
    ints,
    job_type,
    join,
    largest_of,
    longs,
    move_block,
    share_of,
    thread_count,
    thread_number,
    to_weights,
    wait_for_all,
    write_logits,
)

Job = job_type("centroids counts log_counts starts stand_values")
JOB = np.dtype(Job)


@njit(inline="always")
def scores_of(job):
    """View the scores [H, C] at the start of the scratch memory.

    The arrays of `lengths_of`, `weights_of` and `parts_of` follow, in this order.
    """
    return floats(job.scratch, (job.H, job.C))


@njit(inline="always")
def ranks_of(job):
    """View the scores' bits as int32; they sort in the same order, because no score is negative."""
    return ints(job.scratch, (job.H, job.C))


@njit(inline="always")
def lengths_of(job):
    """View the number of tokens to take from each cluster, [H, C] int32."""
    return ints(job.scratch + 4 * job.H * job.C, (job.H, job.C))


@njit(inline="always")
def weights_of(job):
    """View the logits [H, G, C + budget + E] of clusters, chosen rows and exact rows (sinks, tail, new tokens).

    The logits are later overwritten by their exponentials.
    """
    return floats(job.scratch + 8 * job.H * job.C, (job.H, job.G, job.C + job.budget + job.E))


@njit(inline="always")
def parts_of(job, threads):
    """View the threads' partial outputs [threads, H, G, D], and their largest logits and sums [threads, H, G, 2].

    The third array, [threads, G, D], has the sum of a block of rows of one head for each thread.
    """
    H, G, D = job.H, job.G, job.D
    outputs = job.scratch + 8 * H * job.C + 4 * H * G * (job.C + job.budget + job.E)
    sums = outputs + 4 * threads * H * G * D
    blocks = sums + 8 * threads * H * G
    return floats(outputs, (threads, H, G, D)), floats(sums, (threads, H, G, 2)), floats(blocks, (threads, G, D))


def scratch_size(job: Any, threads: int) -> int:
    """Return the size of the scratch memory in 32-bit words."""
    H, G, D, C = job.H, job.G, job.D, job.C
    size: int = H * (2 * C + G * (C + job.budget + job.E + threads * (D + 2))) + threads * G * D
    return size


@njit(inline="always")
def _score(logits, log_counts, counts, scores):
    """Write the clusters' scores [C] of one head, and add the log counts to its logits [G, ...].

    A score is the cluster's attention probability, summed over the G query heads and divided by the cluster's token
    count.
    """
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
    """Find, bit by bit, the highest rank r such that the clusters of rank r or above together hold `budget` tokens."""
    last = np.int32(0)
    for bit in range(30, -1, -1):
        tried, held = np.int32(last | (1 << bit)), np.int32(0)
        for c in range(len(counts)):
            held += counts[c] if ranks[c] >= tried else np.int32(0)
        last = tried if held >= budget else last
    return last


@njit(inline="always")
def _fill(ranks, counts, budget, lengths):
    """Write the number of tokens to take from each cluster, `budget` in total.

    Clusters above the last score (see `_last_score`) are taken whole. Clusters with the last score follow in order of
    their index, until the budget is used up.
    """
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
            # A centroid represents the tokens of its cluster that are not taken. If all are taken, the log is -inf.
            if lengths[h, c] > 0:
                share = math.log(np.float32(counts[h, c] - lengths[h, c]) / np.float32(counts[h, c]))
                for g in range(G):
                    weights[h, g, c] += share


@njit(inline="always")
def _attend(job, thread, threads):
    """Attend to a thread's share of all heads' rows and centroids.

    Write the thread's partial outputs, and the largest logit and the sum of exponentials of each partial output.
    """
    H, G, D, C, each = job.H, job.G, job.D, job.C, job.budget + job.E
    query, starts = floats(job.query, (H, G, D)), longs(job.starts, (H, C))
    weights, lengths, (parts, sums, blocks) = weights_of(job), lengths_of(job), parts_of(job, threads)
    block = blocks[thread]
    clear(parts[thread], sums[thread], block)
    for h in range(H):
        start, stop = share_of(h * each, each, H * each, thread, threads)
        first, last = share_of(h * C, C, H * C, thread, threads) if job.replace else (0, 0)
        if start < stop or first < last:
            pieces, part = (start, stop, first, last), parts[thread, h]
            _attend_head(job, h, query[h], lengths[h], starts[h], weights[h], part, block, sums[thread, h], pieces)


@njit(inline="always")
def _attend_head(job, h, query, lengths, starts, weights, part, block, sums, pieces):
    """Attend to a thread's rows and centroids of one head.

    Write the rows' logits to `weights` after the logits of the clusters, and then add the weighted values to `part`.
    `pieces` is the range of the rows (start, stop) and that of the centroids (first, last). The chosen rows are counted
    from 0, and the exact rows follow them. `block` is a buffer of zeros for `add_rows`.
    """
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
    begin, held = 0, np.int64(0)
    for c in range(C):
        if lengths[c] > 0:
            low, high, ahead = max(start, begin), min(stop, begin + lengths[c]), begin - starts[c]
            held = add_rows(part, block, held, weights, C + ahead, values, low - ahead, high - ahead, None)
            begin += lengths[c]
    held = add_rows(part, block, held, weights, always, exact_values, first_exact, last_exact, None)
    stand_values = floats(job.stand_values, (job.H, C, D))[h]
    add_rows(part, block, held, weights, np.int64(0), stand_values, first, last, None)
    move_block(part, block)


def _step(version):
    """Make the step function; it closes over `version`, so that numba's cache key includes the checksum `VERSION`."""

    def step(job):
        _ = version
        one, thread, threads = carray(job, 1, JOB)[0], np.int64(thread_number()), np.int64(thread_count())
        _choose(one, thread, threads)
        wait_for_all()
        _attend(one, thread, threads)
        wait_for_all()
        if thread == 0:
            parts, sums, _ = parts_of(one, threads)
            join(one, parts, sums)

    return step


# The step stays alive as a global, because its machine code is freed together with the object.
STEP = compiled(_step(VERSION))
