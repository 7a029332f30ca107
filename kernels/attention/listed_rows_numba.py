"""Compiled arithmetic of a decode step on rows that are listed one by one; see `code_step_numba`."""

import numpy as np
from numba import njit

from sparsekv.kernels.attention.code_memory_numba import NUMBER
from sparsekv.kernels.attention.lanes_numba import fetch
from sparsekv.kernels.attention.step_memory_numba import floats
from sparsekv.kernels.attention.step_rows_numba import SUMS, cap_logits

LINE = 64  # bytes that are loaded together
AHEAD = 8  # rows that are loaded before they are used


@njit(**SUMS)
def write_listed_logits(job, query, keys, values, listed, start, stop, logits, ahead):
    """Write the logits of queries [G, D] on the keys with listed numbers `start` to `stop` of [N] int32; number i's go
    to logits [:, ahead + i]. Rows are far apart, so the next keys are loaded while these are read, and their values
    too.
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


@njit(**SUMS)
def add_listed_rows(output, weights, ahead, rows, listed, start, stop):
    """Add the rows [T, D] with listed numbers `start` to `stop` of [N] int32; to outputs [G, D],
    number i weighted by weights [:, ahead + i]; four rows together."""
    fours = stop - max(stop - start, 0) % 4
    for i in range(start, fours, 4):
        one, two, three, four = listed[i], listed[i + 1], listed[i + 2], listed[i + 3]
        for g in range(output.shape[0]):
            place = ahead + i
            first, second, third, fourth = (
                weights[g, place], weights[g, place + 1], weights[g, place + 2], weights[g, place + 3]
            )  # fmt: skip
            for d in range(output.shape[1]):
                output[g, d] += (
                    first * rows[one, d] + second * rows[two, d] + third * rows[three, d] + fourth * rows[four, d]
                )
    for i in range(fours, stop):
        for g in range(output.shape[0]):
            weight = weights[g, ahead + i]
            for d in range(output.shape[1]):
                output[g, d] += weight * rows[listed[i], d]
