"""Compiled decode step over product codes on a CPU.

One function computes tables of query-centroid products, scores all keys by their codes, chooses the best keys and
attends to them.
"""

import math
from collections import namedtuple
from typing import Any

import numpy as np
from numba import carray, njit

from sparsekv.kernels.attention.compiled_step_numba import (
    LANES,
    LARGEST,
    NOTHING,
    SUMS,
    VERSION,
    add_one,
    add_rows,
    byte_at,
    cap_logits,
    clear,
    compiled,
    exp_of,
    fetch,
    floats,
    ints,
    job_type,
    join,
    largest_of,
    load_lanes,
    move_block,
    no_lanes,
    plus,
    plus_times,
    share_of,
    store_lanes,
    thread_count,
    thread_number,
    to_weights,
    wait_for_all,
    write_logits,
)

CODES = 256  # rows of a table, one for each value of a byte
BLOCK = 256  # keys of a block: the logits of all its keys are computed before their exponentials
SCANNED = BLOCK + BLOCK // LANES  # vectors of four float32 for a block: four logits and one sum for each key
BINS = 2048  # bins of the score histogram, by the exponent and the first three fraction bits
BIN_BITS = 20  # low bits of a score that its bin ignores
NUMBER = 4  # bytes of a float32 or an int32


Job = job_type("turn books codes labels centroids counts masses rest_values", "M parts size")
"""M is the number of keys of a head. A key's code has `parts` bytes, each for a part of `size` channels."""
JOB = np.dtype(Job)
Memory = namedtuple("Memory", "scores found taken weights tables logits bins lanes outputs blocks sums done end")


def place_arrays(job, threads):
    """Compute the addresses of the arrays in scratch memory, and the end of the last array.

    H is the number of KV heads, G the number of query heads of a KV head, and D the number of channels. Each KV head
    has M keys, of which `budget` are chosen, C clusters and E exact rows. `fours` = ceil(G / 4) is the number of
    vectors of LANES = 4 query heads. A key's code has `parts` bytes, each for `size` channels. Arrays without a dtype
    are float32.

    All threads share these arrays:
        scores: [H, M]; their bits are also read as int32 ranks.
        found: [H, M] int32, the candidates among the keys; at the end, the first `budget` are the chosen keys.
        taken: [H, C] int32, the number of chosen keys in each cluster.
        weights: [H, G, C + budget + E], the logits of clusters, chosen rows and exact rows, later their exponentials.
        done: int32, the number of threads that have written their partial outputs.

    Each thread has its own element of the first axis of these arrays:
        tables: [threads, fours, parts, CODES, LANES], the products of a head's queries with its codebooks.
        logits: [threads, G, C + E], the logits of a head's clusters and exact rows.
        bins: [threads, H, BINS] int32, the histogram of the scores.
        lanes: [threads, fours * (D + size) + SCANNED, LANES], see `lanes_of`.
        outputs: [threads, H, G, D], partial outputs.
        blocks: [threads, G, D], the sum of a block of rows of one head.
        sums: [threads, H, G, 2], the largest logit and the sum of exponentials of each partial output.
    """
    H, G, D, C = job.H, job.G, job.D, job.C
    found = job.scratch + NUMBER * H * job.M
    taken = found + NUMBER * H * job.M
    weights = taken + NUMBER * H * C
    tables = weights + NUMBER * H * G * (C + job.budget + job.E)
    logits = tables + NUMBER * threads * job.fours * job.parts * CODES * LANES
    bins = logits + NUMBER * threads * G * (C + job.E)
    lanes = bins + NUMBER * threads * H * BINS
    outputs = lanes + NUMBER * threads * (job.fours * (D + job.size) + SCANNED) * LANES
    blocks = outputs + NUMBER * threads * H * G * D
    sums = blocks + NUMBER * threads * G * D
    done = sums + NUMBER * threads * H * G * 2
    own = tables, logits, bins, lanes, outputs, blocks, sums
    return Memory(job.scratch, found, taken, weights, *own, done, done + NUMBER)


memory_of = njit(inline="always")(place_arrays)


@njit(inline="always")
def weights_of(job, memory):
    return floats(memory.weights, (job.H, job.G, job.C + job.budget + job.E))


@njit(inline="always")
def lanes_of(job, memory, thread):
    """Compute the addresses of a thread's three arrays of vectors; a vector holds a float32 for each of 4 query heads.

    The arrays are the query [fours, D], one part of the rotated query [fours, size], and the logits [BLOCK] of a
    block's keys. `fours` is the number of vectors that hold all query heads. A buffer of one float32 for each key
    follows the logits.
    """
    query = memory.lanes + NUMBER * LANES * thread * (job.fours * (job.D + job.size) + SCANNED)
    rotated = query + NUMBER * LANES * job.fours * job.D
    return query, rotated, rotated + NUMBER * LANES * job.fours * job.size


def scratch_size(job: Any, threads: int) -> int:
    """Return the size of the scratch memory in 32-bit words."""
    memory = place_arrays(job, threads)
    size: int = (memory.end - memory.scores) // NUMBER
    return size


@njit
def lowest_of_last_bin(bins, budget):
    """Return the lowest rank of the bin that holds the `budget`-th best key, from counts [threads, BINS].

    A rank is the bits of a score, read as int32. Scores are not negative, and so ranks sort like scores.
    """
    held, bin = 0, BINS
    while held < budget and bin > 0:
        bin -= 1
        for thread in range(len(bins)):
            held += bins[thread, bin]
    return np.int32(bin << BIN_BITS)


@njit
def list_ranks(ranks, lowest, found):
    """Write the keys with a rank of at least `lowest` to `found`, in ascending order; return their number.

    The ranks of these keys are moved to the front of `ranks`, in the same order.
    """
    number = 0
    for key in range(len(ranks)):
        found[number] = key
        number += ranks[key] >= lowest
    for i in range(number):
        ranks[i] = ranks[found[i]]
    return number


@njit
def last_rank(ranks, number, lowest, budget):
    """Find, bit by bit, the highest rank that at least `budget` of the first `number` ranks reach.

    All these ranks are at least `lowest`.
    """
    last = lowest
    for bit in range(BIN_BITS - 1, -1, -1):
        tried, held = np.int32(last | (1 << bit)), np.int32(0)
        for i in range(number):
            held += np.int32(1) if ranks[i] >= tried else np.int32(0)
        last = tried if held >= budget else last
    return last


@njit
def keep_best(ranks, number, last, budget, found):
    """Keep `budget` of the `number` keys in `found`, in ascending order.

    These are all keys with a rank above `last`, and the first keys with rank `last`.
    """
    kept, equal = np.int64(0), np.int64(budget)
    for i in range(number):
        equal -= ranks[i] > last
    for i in range(number):
        takes = ranks[i] > last or (ranks[i] == last and equal > 0)
        equal -= ranks[i] == last
        found[kept] = found[i]
        kept += takes


ROW = NUMBER * LANES  # bytes of a row of a table
LARGEST_EXPONENT = np.float32(60)  # upper bound of a logit minus its log-sum-exp: sums stay within float32


@njit(**SUMS)
def spread_query(job, query, lanes):
    """Write a scaled query [G, D] to `lanes` as [fours, D, LANES], vectors of LANES heads; heads past G are zeros."""
    width = job.fours * LANES
    spread = floats(lanes, (job.fours, job.D, LANES))
    for g in range(width):
        for d in range(job.D):
            spread[g // LANES, d, g % LANES] = query[g, d] * job.scale if g < job.G else np.float32(0)


@njit(**SUMS)
def write_table(job, turn, book, part, table, lanes, rotated):
    """Write one part's table: the products [fours, CODES, LANES] of the rotated query with the part's centroids.

    `fours` is the number of vectors of LANES query heads. `book` holds the centroids [CODES, size]. The rotated query
    is the query times the matrix `turn` [D, D]. `table` is the address of the tables [fours, parts, CODES, LANES] of
    all parts, and `lanes` that of the query [fours, D, LANES]. `rotated` is the address of a buffer for one part of the
    rotated query.
    """
    D, size = job.D, job.size
    for four in range(job.fours):
        for e in range(size):
            total = no_lanes()
            for d in range(D):
                total = plus_times(total, turn[d, part * size + e], load_lanes(lanes + ROW * (four * D + d)))
            store_lanes(rotated + ROW * e, total)
        rows = table + ROW * CODES * (four * job.parts + part)
        for code in range(CODES):
            total = no_lanes()
            for e in range(size):
                total = plus_times(total, book[code, e], load_lanes(rotated + ROW * e))
            store_lanes(rows + ROW * code, total)


@njit(**SUMS)
def add_products(parts, codes, number, table, logits):
    """Write the logits [number, LANES] of `number` keys for LANES query heads, as sums of table rows.

    `codes` is the address of the keys' codes [number, parts], and `table` that of the rows [parts, CODES, LANES].
    """
    for key in range(number):
        total, rows = no_lanes(), table
        for _ in range(parts // 4):
            one = plus(load_lanes(rows + ROW * byte_at(codes)), load_lanes(rows + ROW * (CODES + byte_at(codes + 1))))
            two = plus(
                load_lanes(rows + ROW * (2 * CODES + byte_at(codes + 2))),
                load_lanes(rows + ROW * (3 * CODES + byte_at(codes + 3))),
            )
            total = plus(total, plus(one, two))
            rows, codes = rows + 4 * ROW * CODES, codes + 4
        for _ in range(parts % 4):
            total = plus(total, load_lanes(rows + ROW * byte_at(codes)))
            rows, codes = rows + ROW * CODES, codes + 1
        store_lanes(logits + ROW * key, total)


@njit(**SUMS)
def cap(numbers, count, softcap):
    """Replace `count` numbers by softcap * tanh(number / softcap).

    tanh is computed from `exp_of`, because a library call would not be vectorised.
    """
    for i in range(count):
        shrunk = exp_of(np.float32(-2) * abs(numbers[i] / softcap))
        capped = softcap * (np.float32(1) - shrunk) / (np.float32(1) + shrunk)
        numbers[i] = capped if numbers[i] > 0 else -capped


@njit(**LARGEST)
def _largest_of_sums(numbers, others, most):
    for i in range(len(others)):
        most = max(most, numbers[i] + others[i])
    return most


@njit(**SUMS)
def log_total(logits, masses, sink):
    """Compute the log-sum-exp of logits [C + E] and of a learned sink; `sink` is NOTHING without a sink.

    The first C logits are those of the clusters; their masses [C] are added to them.
    """
    largest = largest_of(logits, len(masses), len(logits), _largest_of_sums(logits, masses, sink))
    largest = np.float32(0) if largest == NOTHING else largest
    total = exp_of(sink - largest)
    for c in range(len(masses)):
        total += exp_of(logits[c] + masses[c] - largest)
    for i in range(len(masses), len(logits)):
        total += exp_of(logits[i] - largest)
    return largest + np.float32(math.log(total))


@njit(**SUMS)
def add_probabilities(logits, totals, sums, scores, first, number):
    """Add the probabilities of `number` keys to `scores`, from index `first` on; NaN scores become 0.

    The logits are [number * LANES], those of LANES query heads for each key. `totals` [LANES] are the query heads'
    log-sum-exps. The probabilities of a key's query heads are summed in `sums`, a buffer for `number` values. Without
    this buffer, the compiler would not vectorise these sums of values with stride 4.
    """
    one, two, three, four = totals[0], totals[1], totals[2], totals[3]
    for key in range(number):
        sums[key] = (
            exp_of(min(logits[LANES * key] - one, LARGEST_EXPONENT))
            + exp_of(min(logits[LANES * key + 1] - two, LARGEST_EXPONENT))
            + exp_of(min(logits[LANES * key + 2] - three, LARGEST_EXPONENT))
            + exp_of(min(logits[LANES * key + 3] - four, LARGEST_EXPONENT))
        )
    for key in range(number):
        score = scores[first + key] + sums[key]
        scores[first + key] = score if score > 0 else np.float32(0)


@njit
def count_ranks(ranks, start, stop, bins):
    """Add the ranks from `start` to `stop` to the histogram `bins`; no rank is negative."""
    for key in range(start, stop):
        bins[np.uint32(ranks[key]) >> np.uint32(BIN_BITS)] += 1


@njit(inline="always")
def scan(job, memory, thread, codes, table, totals, scores, ranks, start, stop, bins):
    """Score the keys from `start` to `stop` of a head, and count the scores by bin.

    `codes` and `table` are the addresses of the head's codes [M, parts] and tables. `totals` [fours, LANES] are the
    log-sum-exps of the query heads.
    """
    address = lanes_of(job, memory, thread)[2]
    logits, sums = floats(address, (BLOCK * LANES,)), floats(address + ROW * BLOCK, (BLOCK,))
    for first in range(start, stop, BLOCK):
        number = min(BLOCK, stop - first)
        for key in range(first, first + number):
            scores[key] = 0
        for four in range(job.fours):
            rows = table + ROW * CODES * job.parts * four
            add_products(job.parts, codes + first * job.parts, number, rows, address)
            if job.softcap > 0:
                cap(logits, number * LANES, job.softcap)
            add_probabilities(logits, totals[four], sums, scores, first, number)
        count_ranks(ranks, first, first + number, bins)


LINE = 64  # bytes of a cache line
AHEAD = 8  # distance of the prefetch, in rows


@njit(**SUMS)
def write_listed_logits(job, query, keys, values, listed, start, stop, logits, ahead):
    """Write the logits of queries [G, D] for the keys whose indices are at positions `start` to `stop` of `listed`.

    `keys` and `values` are addresses of rows of D float32; `listed` is [N] int32. The logits of position i go to
    logits [:, ahead + i]. Chosen rows are far apart in memory. Therefore keys are prefetched AHEAD rows early, and the
    current key's value is prefetched too.
    """
    D = query.shape[1]
    for i in range(start, stop):
        t, later = listed[i], listed[min(i + AHEAD, stop - 1)]
        for place in range(0, NUMBER * D, LINE):
            fetch(keys + NUMBER * D * later + place)
            fetch(values + NUMBER * D * t + place)
        key = floats(keys + NUMBER * D * t, (D,))
        for g in range(query.shape[0]):
            product = np.float32(0)
            for d in range(D):
                product += query[g, d] * key[d]
            logits[g, ahead + i] = product * job.scale
    cap_logits(job, logits, ahead + start, ahead + stop)


@njit(inline="always")
def _score(job, memory, thread, threads):
    """Score a thread's share of all heads' keys.

    A head's keys may be shared by several threads. Each of them computes the head's tables itself, so that no thread
    waits for another. The thread with the head's first key writes the logits of the head's clusters and exact rows to
    the memory that all threads read. If all keys are chosen, only these logits are computed.
    """
    H, M, parts = job.H, job.M, job.parts
    scores, ranks = floats(memory.scores, (H, M)), ints(memory.scores, (H, M))
    bins = ints(memory.bins, (threads, H, BINS))[thread]
    table = memory.tables + ROW * CODES * parts * job.fours * thread
    logits = floats(memory.logits, (threads, job.G, job.C + job.E))[thread]
    # After the tables are written, the query's vectors are reused for the group's log-sum-exps.
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
    """Write the logits [G, C + E] of a head's clusters and exact rows (sinks, tail and new tokens)."""
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
    spread, rotated, _ = lanes_of(job, memory, thread)
    spread_query(job, floats(job.query, (H, job.G, D))[h], spread)
    for part in range(parts):
        write_table(job, turn, books[part], part, table, spread, rotated)


@njit(inline="always")
def _write_totals(job, h, logits, totals):
    """Write the log-sum-exps [fours, LANES] that turn the group's logits into probabilities.

    The entries past the last query head are infinite.
    """
    masses = floats(job.masses, (job.H, job.C))[h]
    for g in range(job.fours * LANES):
        sink = floats(job.sinks, (job.H, job.G))[h, g] if job.sinks and g < job.G else NOTHING
        total = log_total(logits[g], masses, sink) if g < job.G else -NOTHING
        totals[g // LANES, g % LANES] = total


@njit(inline="always")
def _choose(job, memory, thread, threads):
    """List the `budget` best keys of heads `thread`, `thread` + `threads`, and so on.

    Also add to the logit of each cluster the log weight of its keys that are not chosen.
    """
    H, M, budget = job.H, job.M, job.budget
    ranks, found = ints(memory.scores, (H, M)), ints(memory.found, (H, M))
    bins, labels = ints(memory.bins, (threads, H, BINS)), ints(job.labels, (H, M))
    for h in range(thread, H, threads):
        if budget < M:
            lowest = lowest_of_last_bin(bins[:, h], budget)
            number = list_ranks(ranks[h], lowest, found[h])
            keep_best(ranks[h], number, last_rank(ranks[h], number, lowest, budget), budget, found[h])
        else:
            for key in range(M):
                found[h, key] = key
        _leave(job, memory, h, found[h], labels[h])


@njit(inline="always")
def _leave(job, memory, h, found, labels):
    """Add a log weight to the logit of each cluster of a head, for the cluster's keys that are not chosen.

    The log weight is the cluster's mass plus the log of the share of these keys. Also count each cluster's chosen keys
    in `taken`.
    """
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
    """Attend to a thread's share of all heads' rows and centroids.

    Write the thread's partial outputs, and the largest logit and the sum of exponentials of each partial output.
    """
    H, G, D, C, each = job.H, job.G, job.D, job.C, job.budget + job.E
    outputs, sums = floats(memory.outputs, (threads, H, G, D))[thread], floats(memory.sums, (threads, H, G, 2))[thread]
    block = floats(memory.blocks, (threads, G, D))[thread]
    clear(outputs, sums, block)
    for h in range(H):
        start, stop = share_of(h * each, each, H * each, thread, threads)
        first, last = share_of(h * C, C, H * C, thread, threads) if job.replace else (0, 0)
        if start < stop or first < last:
            _attend_head(job, memory, h, outputs[h], block, sums[h], start, stop, first, last)


@njit(inline="always")
def _attend_head(job, memory, h, output, block, sums, start, stop, first, last):
    """Attend to a thread's rows of one head, from `start` up to `stop`, and to its centroids, `first` up to `last`.

    The chosen rows are counted from 0, and the exact rows follow them. Write the logits of the chosen rows, and then
    add the weighted values of all rows and centroids to `output`. `block` is a buffer of zeros for `add_rows`.
    """
    H, D, M, C, E, budget = job.H, job.D, job.M, job.C, job.E, job.budget
    query, found = floats(job.query, (H, job.G, D))[h], ints(memory.found, (H, M))[h]
    keys, values = job.keys + h * job.key_step, job.values + h * job.value_step
    exact = floats(job.exact_values + h * job.exact_value_step, (E, D))
    weights, chosen = weights_of(job, memory)[h], min(stop, budget)
    write_listed_logits(job, query, keys, values, found, start, chosen, weights, C)
    to_weights(weights, sums, C + start, C + stop, first, last)
    held = add_rows(output, block, np.int64(0), weights, C, floats(values, (M, D)), start, chosen, found)
    held = add_rows(output, block, held, weights, C + budget, exact, max(start - budget, 0), stop - budget, None)
    add_rows(output, block, held, weights, np.int64(0), floats(job.rest_values, (H, C, D))[h], first, last, None)
    move_block(output, block)


def _step(version):
    """Make the step function; it closes over `version`, so that numba's cache key includes the checksum `VERSION`."""

    def step(address):
        _ = version
        job, thread, threads = carray(address, 1, JOB)[0], np.int64(thread_number()), np.int64(thread_count())
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


# The step stays alive as a global, because its machine code is freed together with the object.
STEP = compiled(_step(VERSION))
