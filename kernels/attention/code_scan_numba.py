"""Compiled: scores of all keys by their codes, and how many fall into each bin; see `code_step_numba`."""

import math

import numpy as np
from numba import njit

from sparsekv.kernels.attention.code_memory_numba import BIN_BITS, BLOCK, CODES, NUMBER, lanes_of
from sparsekv.kernels.attention.lanes_numba import LANES, byte_at, load_lanes, no_lanes, plus, plus_times, store_lanes
from sparsekv.kernels.attention.step_memory_numba import floats
from sparsekv.kernels.attention.step_rows_numba import LARGEST, NOTHING, SUMS, exp_of, largest_of

ROW = NUMBER * LANES  # bytes of a row of a table
MOST = np.float32(60)  # of a logit above its log-sum-exp: its exponential, summed, is a float32


@njit(**SUMS)
def spread_query(job, query, lanes):
    """Write a query [G, D], scaled, as lanes [fours, D]; zeros for heads past the last."""
    width = job.fours * LANES
    spread = floats(lanes, (job.fours, job.D, LANES))
    for g in range(width):
        for d in range(job.D):
            spread[g // LANES, d, g % LANES] = query[g, d] * job.scale if g < job.G else np.float32(0)


@njit(**SUMS)
def write_table(job, turn, book, part, table, lanes, turned):
    """Write the products [fours, parts, CODES, LANES] of one part of the turned query with its centroids [CODES, size];
    turn [D, D], lanes [fours, D] of the query."""
    D, size = job.D, job.size
    for four in range(job.fours):
        for e in range(size):
            total = no_lanes()
            for d in range(D):
                total = plus_times(total, turn[d, part * size + e], load_lanes(lanes + ROW * (four * D + d)))
            store_lanes(turned + ROW * e, total)
        rows = table + ROW * CODES * (four * job.parts + part)
        for code in range(CODES):
            total = no_lanes()
            for e in range(size):
                total = plus_times(total, book[code, e], load_lanes(turned + ROW * e))
            store_lanes(rows + ROW * code, total)


@njit(**SUMS)
def add_products(parts, codes, number, table, logits):
    """Write the logits [number, LANES] of so many keys, whose codes [number, parts] begin at an address."""
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
    """Replace so many numbers by softcap * tanh(number / softcap), by a polynomial: a function call would not be
    vectorised."""
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
    """Log-sum-exp of a learned sink, or NOTHING, and logits [C + E], of which the first are clusters', with masses [C]
    that are added to these."""
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
    """Add to scores, from the first on, the probabilities of logits [number * LANES] by their log-sum-exps [LANES];
    what is no number becomes 0. `sums` is room for so many numbers, because sums of what is read in fours are
    vectorised only where they are new."""
    one, two, three, four = totals[0], totals[1], totals[2], totals[3]
    for key in range(number):
        sums[key] = (
            exp_of(min(logits[LANES * key] - one, MOST))
            + exp_of(min(logits[LANES * key + 1] - two, MOST))
            + exp_of(min(logits[LANES * key + 2] - three, MOST))
            + exp_of(min(logits[LANES * key + 3] - four, MOST))
        )
    for key in range(number):
        score = scores[first + key] + sums[key]
        scores[first + key] = score if score > 0 else np.float32(0)


@njit
def count_ranks(ranks, start, stop, bins):
    """Count ranks, none of which is negative, by bin."""
    for key in range(start, stop):
        bins[np.uint32(ranks[key]) >> np.uint32(BIN_BITS)] += 1


@njit(inline="always")
def scan(job, memory, thread, codes, table, totals, scores, ranks, start, stop, bins):
    """Score keys `start` to `stop` of a head, whose codes [M, parts] begin at an address."""
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
