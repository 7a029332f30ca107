"""A compiled decode step over codes on a CPU, from the query to the output: tables of products, a scan of all codes,
the choice, and attention to what is chosen and to what stands for the rest, in one function; without an output it ends
with the choice."""

import math

import numpy as np
from numba import carray, njit

from sparsekv.kernels.attention.code_choice_numba import keep_best, last_rank, list_ranks, lowest_rank
from sparsekv.kernels.attention.code_memory_numba import BINS, CODE_JOB, CODES, lanes_of, memory_of, weights_of
from sparsekv.kernels.attention.code_scan_numba import ROW, log_total, scan, spread_query, write_table
from sparsekv.kernels.attention.lanes_numba import LANES, add_one
from sparsekv.kernels.attention.listed_rows_numba import add_listed_rows, write_listed_logits
from sparsekv.kernels.attention.step_memory_numba import floats, ints
from sparsekv.kernels.attention.step_output_numba import clear, join, to_weights
from sparsekv.kernels.attention.step_rows_numba import NOTHING, add_rows, write_logits
from sparsekv.kernels.attention.step_threads_numba import (
    VERSION,
    compiled,
    share_of,
    thread_count,
    thread_number,
    wait_for_all,
)


@njit(inline="always")
def _score(job, memory, thread, threads):
    """Score a thread's share of all heads' keys. Threads that share a head make its tables each for themselves, so that
    none waits for another; the one that has the first key writes the logits of clusters and exact rows for all."""
    H, M, parts = job.H, job.M, job.parts
    scores, ranks = floats(memory.scores, (H, M)), ints(memory.scores, (H, M))
    bins = ints(memory.bins, (threads, H, BINS))[thread]
    table = memory.tables + ROW * CODES * parts * job.fours * thread
    logits = floats(memory.logits, (threads, job.G, job.C + job.E))[thread]
    # Once the table is made, its lanes are free for the group's log-sum-exps.
    totals = floats(lanes_of(job, memory, thread)[0], (job.fours, LANES))
    for h in range(H):
        for bin in range(BINS):
            bins[h, bin] = 0
        start, stop = share_of(h * M, M, H * M, thread, threads)
        if start < stop:
            _write_logits(job, h, logits)
            if start == 0:
                _share_logits(job, memory, h, logits)
            if job.budget < M:
                _write_tables(job, memory, h, thread, table)
                _write_totals(job, h, logits, totals)
                codes = job.codes + h * M * parts
                scan(job, memory, thread, codes, table, totals, scores[h], ranks[h], start, stop, bins[h])


@njit(inline="always")
def _write_logits(job, h, logits):
    """Logits [G, C + E] of a head's clusters and exact rows."""
    H, D, C, E = job.H, job.D, job.C, job.E
    query, exact = floats(job.query, (H, job.G, D))[h], floats(job.exact_keys + h * job.exact_key_step, (E, D))
    write_logits(job, query, floats(job.centroids, (H, C, D))[h], np.int64(0), C, logits, np.int64(0))
    write_logits(job, query, exact, np.int64(0), E, logits, C)


@njit(inline="always")
def _share_logits(job, memory, h, logits):
    C, weights = job.C, weights_of(job, memory)[h]
    for g in range(job.G):
        for c in range(C):
            weights[g, c] = logits[g, c]
        for e in range(job.E):
            weights[g, C + job.budget + e] = logits[g, C + e]


@njit(inline="always")
def _write_tables(job, memory, h, thread, table):
    H, D, parts = job.H, job.D, job.parts
    turn, books = floats(job.turn, (H, D, D))[h], floats(job.books, (H, parts, CODES, job.size))[h]
    spread, turned, _ = lanes_of(job, memory, thread)
    spread_query(job, floats(job.query, (H, job.G, D))[h], spread)
    for part in range(parts):
        write_table(job, turn, books[part], part, table, spread, turned)


@njit(inline="always")
def _write_totals(job, h, logits, totals):
    """Log-sum-exps by which the group's logits become probabilities [fours, LANES]; infinite past the last head."""
    masses = floats(job.masses, (job.H, job.C))[h]
    for g in range(job.fours * LANES):
        sink = floats(job.sinks, (job.H, job.G))[h, g] if job.sinks and g < job.G else NOTHING
        total = log_total(logits[g], masses, sink) if g < job.G else -NOTHING
        totals[g // LANES, g % LANES] = total


@njit(inline="always")
def _choose(job, memory, thread, threads):
    """List the best keys of a thread's heads, and leave to each cluster the weight of its other keys."""
    H, M, budget = job.H, job.M, job.budget
    ranks, found = ints(memory.scores, (H, M)), ints(memory.found, (H, M))
    bins, labels = ints(memory.bins, (threads, H, BINS)), ints(job.labels, (H, M))
    for h in range(thread, H, threads):
        if budget < M:
            lowest = lowest_rank(bins[:, h], budget)
            number = list_ranks(ranks[h], lowest, found[h])
            keep_best(ranks[h], number, last_rank(ranks[h], number, lowest, budget), budget, found[h])
        else:
            for key in range(M):
                found[h, key] = key
        _leave(job, memory, h, found[h], labels[h])


@njit(inline="always")
def _leave(job, memory, h, found, labels):
    """Add to the logits of a head's clusters what their keys weigh that are not chosen."""
    C, taken = job.C, ints(memory.taken, (job.H, job.C))[h]
    counts, masses = ints(job.counts, (job.H, C))[h], floats(job.masses, (job.H, C))[h]
    weights = weights_of(job, memory)[h]
    for c in range(C):
        taken[c] = 0
    for i in range(job.budget):
        taken[labels[found[i]]] += 1
    for c in range(C):
        left = masses[c]
        if taken[c] > 0:
            left += np.float32(math.log(np.float32(counts[c] - taken[c]) / np.float32(counts[c])))
        for g in range(job.G):
            weights[g, c] += left


@njit(inline="always")
def _attend(job, memory, thread, threads):
    """Attend to a thread's share of all heads' rows and centroids: partial outputs, with largest logits and sums."""
    H, G, D, C, each = job.H, job.G, job.D, job.C, job.budget + job.E
    outputs, sums = floats(memory.outputs, (threads, H, G, D))[thread], floats(memory.sums, (threads, H, G, 2))[thread]
    clear(outputs, sums)
    for h in range(H):
        start, stop = share_of(h * each, each, H * each, thread, threads)
        first, last = share_of(h * C, C, H * C, thread, threads) if job.replace else (0, 0)
        if start < stop or first < last:
            _attend_head(job, memory, h, outputs[h], sums[h], start, stop, first, last)


@njit(inline="always")
def _attend_head(job, memory, h, output, sums, start, stop, first, last):
    """A thread's rows and centroids of one head: logits of the chosen rows, then weighted values of all."""
    H, D, M, C, E, budget = job.H, job.D, job.M, job.C, job.E, job.budget
    query, found = floats(job.query, (H, job.G, D))[h], ints(memory.found, (H, M))[h]
    keys, values = job.keys + h * job.key_step, job.values + h * job.value_step
    exact = floats(job.exact_values + h * job.exact_value_step, (E, D))
    weights, chosen = weights_of(job, memory)[h], min(stop, budget)
    write_listed_logits(job, query, keys, values, found, start, chosen, weights, C)
    to_weights(weights, sums, C + start, C + stop, first, last)
    add_listed_rows(output, weights, C, floats(values, (M, D)), found, start, chosen)
    add_rows(output, weights, C + budget, exact, max(start - budget, 0), stop - budget)
    add_rows(output, weights, np.int64(0), floats(job.rest_values, (H, C, D))[h], first, last)


def _step(version):
    """See `VERSION`."""

    def step(address):
        _ = version
        job, thread, threads = carray(address, 1, CODE_JOB)[0], np.int64(thread_number()), np.int64(thread_count())
        memory = memory_of(job, threads)
        _score(job, memory, thread, threads)
        if thread == 0:
            ints(memory.done, (1,))[0] = 0
        wait_for_all()
        _choose(job, memory, thread, threads)
        if not job.output:
            return
        wait_for_all()
        _attend(job, memory, thread, threads)
        if add_one(memory.done) == threads - 1:
            H, G, D = job.H, job.G, job.D
            join(job, floats(memory.outputs, (threads, H, G, D)), floats(memory.sums, (threads, H, G, 2)))

    return step


# A global, because the machine code is freed with it.
STEP = compiled(_step(VERSION))
