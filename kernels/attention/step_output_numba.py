"""A compiled step's output: each thread's softmax over its share of the logits, and all threads' parts as one."""

import numpy as np
from numba import njit

from sparsekv.kernels.attention.step_memory_numba import floats
from sparsekv.kernels.attention.step_rows_numba import NOTHING, exp_of, exponents, largest_of


@njit(inline="always")
def clear(parts, sums):
    """Empty partial outputs [H, G, D] of a thread, with no logit in their sums [H, G, 2]."""
    for h in range(parts.shape[0]):
        for g in range(parts.shape[1]):
            sums[h, g, 0], sums[h, g, 1] = NOTHING, 0
            for d in range(parts.shape[2]):
                parts[h, g, d] = 0


@njit(inline="always")
def to_weights(logits, sums, start, stop, first, last):
    """Replace the logits [G, ...] of two ranges by their exponentials, relative to the largest of them; writes that
    and the exponentials' sum to sums [G, 2]."""
    for g in range(logits.shape[0]):
        largest = largest_of(logits[g], start, stop, largest_of(logits[g], first, last, NOTHING))
        sums[g, 0], largest = largest, np.float32(0) if largest == NOTHING else largest
        sums[g, 1] = exponents(logits[g], start, stop, largest)
        sums[g, 1] += exponents(logits[g], first, last, largest)


@njit(inline="always")
def join(job, parts, sums):
    """Write each head's output [G, D] of all threads' parts [threads, H, G, D] and sums, and of its sink logit."""
    H, G, D = job.H, job.G, job.D
    output = floats(job.output, (H, G, D))
    for h in range(H):
        for g in range(G):
            sink = floats(job.sinks, (H, G))[h, g] if job.sinks else NOTHING
            largest = sink
            for thread in range(len(parts)):
                largest = max(largest, sums[thread, h, g, 0])
            total = exp_of(sink - largest)
            for d in range(D):
                output[h, g, d] = 0
            for thread in range(len(parts)):
                weight = exp_of(sums[thread, h, g, 0] - largest)
                total += weight * sums[thread, h, g, 1]
                for d in range(D):
                    output[h, g, d] += weight * parts[thread, h, g, d]
            for d in range(D):
                output[h, g, d] /= total
