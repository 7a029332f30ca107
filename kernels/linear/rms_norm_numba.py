"""Compiled RMS norm of few float32 rows on a CPU, on one thread."""

import ctypes

import numpy as np
from numba import carray, njit

from sparsekv.kernels.attention.compiled_step_numba import SUMS, VERSION, compiled, floats


class Job(ctypes.Structure):
    """Addresses and sizes of rows [R, D], weights [D] and output [R, D]; `offset` is added to the weights."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "weight", "output", "R", "D")),
        ("eps", ctypes.c_float),
        ("offset", ctypes.c_float),
    ]


JOB = np.dtype(Job)


@njit(**SUMS)
def _norm(row, weight, output, eps, offset):
    squares = np.float32(0)
    for d in range(len(row)):
        squares += row[d] * row[d]
    factor = np.float32(1) / np.sqrt(squares / np.float32(len(row)) + eps)
    for d in range(len(row)):
        output[d] = row[d] * factor * (weight[d] + offset)


def _step(version):
    """Make the step function; it closes over `version`, so that numba's cache key includes the checksum `VERSION`."""

    def step(address):
        _ = version
        job = carray(address, 1, JOB)[0]
        rows, output = floats(job.rows, (job.R, job.D)), floats(job.output, (job.R, job.D))
        for r in range(job.R):
            _norm(rows[r], floats(job.weight, (job.D,)), output[r], job.eps, job.offset)

    return step


# The step stays alive as a global, because its machine code is freed together with the object.
STEP = compiled(_step(VERSION))
CALL = STEP.ctypes
