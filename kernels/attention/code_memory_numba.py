"""What the threads of a compiled step over codes share: a job, and scratch memory; see `code_step_numba`."""

import ctypes
from collections import namedtuple

import numpy as np
from numba import njit

from sparsekv.kernels.attention.lanes_numba import LANES
from sparsekv.kernels.attention.step_memory_numba import floats

ADDRESSES = (
    "turn books codes labels centroids counts masses rest_values query keys values exact_keys exact_values sinks"
)
SIZES = "scratch output H G D M C E fours parts size budget replace key_step value_step exact_key_step exact_value_step"
CODES = 256  # rows of a table: the values of a byte
BLOCK = 256  # keys whose logits are summed before their exponentials are
SCANNED = BLOCK + BLOCK // LANES  # fours of numbers: a block's logits, and a number for each key
BINS = 2048  # of scores, by their exponent and the first three bits of their fraction
BIN_BITS = 20  # the other bits of a score
NUMBER = 4  # bytes of a float32 or an int32


class CodeJob(ctypes.Structure):
    """Addresses, sizes, strides in bytes between heads (`_step`), and scale and soft cap of the logits.

    `fours` are the group's query heads in fours, `parts` those of a key's code, each of `size` channels.
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in f"{ADDRESSES} {SIZES}".split()),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


CODE_JOB = np.dtype(CodeJob)
Memory = namedtuple("Memory", "scores found taken weights tables logits bins lanes outputs sums done end")


def lay_out(job, threads):
    """Addresses of the scratch memory's arrays, and where it ends.

    scores [H, M], or their bits; found [H, M] int32, the keys that are listed, in the end those that are chosen; taken
    [H, C] int32, how many are of each cluster; weights [H, G, C + budget + E], logits and later their exponentials, of
    clusters, chosen rows and exact rows. Of each thread: tables [threads, fours, parts, CODES, LANES], products of a
    head's queries with its codebooks; logits [threads, G, C + E] of its clusters and exact rows; bins [threads, H,
    BINS] int32, counts of scores; lanes [threads, fours * (D + size) + SCANNED, LANES]; outputs [threads, H, G, D], and
    their largest logits and sums [threads, H, G, 2]. Last, an int32 of how many threads are done.
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
    sums = outputs + NUMBER * threads * H * G * D
    done = sums + NUMBER * threads * H * G * 2
    return Memory(job.scratch, found, taken, weights, tables, logits, bins, lanes, outputs, sums, done, done + NUMBER)


memory_of = njit(inline="always")(lay_out)


@njit(inline="always")
def weights_of(job, memory):
    return floats(memory.weights, (job.H, job.G, job.C + job.budget + job.E))


@njit(inline="always")
def lanes_of(job, memory, thread):
    """Addresses of a thread's lanes: of the query [fours, D], of the same turned [fours, size], and of the
    logits [BLOCK] of keys, with room for as many numbers behind them."""
    query = memory.lanes + NUMBER * LANES * thread * (job.fours * (job.D + job.size) + SCANNED)
    turned = query + NUMBER * LANES * job.fours * job.D
    return query, turned, turned + NUMBER * LANES * job.fours * job.size


def scratch_size(job: CodeJob, threads: int) -> int:
    """Size of the scratch memory in 32-bit numbers."""
    memory = lay_out(job, threads)
    size: int = (memory.end - memory.scores) // NUMBER
    return size
