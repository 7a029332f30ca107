"""Compiled: the keys of highest score, by counts of their ranks; see `code_step_numba`."""

import numpy as np
from numba import njit

from sparsekv.kernels.attention.code_memory_numba import BIN_BITS, BINS


@njit
def lowest_rank(bins, budget):
    """The lowest rank of the bin that the last of `budget` keys is in, by each thread's counts [threads, BINS]."""
    held, bin = 0, BINS
    while held < budget and bin > 0:
        bin -= 1
        for thread in range(len(bins)):
            held += bins[thread, bin]
    return np.int32(bin << BIN_BITS)


@njit
def list_ranks(ranks, lowest, found):
    """List the keys with that rank or a higher one, in order, and replace the first ranks by theirs; returns how
    many they are."""
    number = 0
    for key in range(len(ranks)):
        found[number] = key
        number += ranks[key] >= lowest
    for i in range(number):
        ranks[i] = ranks[found[i]]
    return number


@njit
def last_rank(ranks, number, lowest, budget):
    """The highest rank that at least `budget` of the first ranks reach, found bit by bit; all are at least `lowest`."""
    last = lowest
    for bit in range(BIN_BITS - 1, -1, -1):
        tried, held = np.int32(last | (1 << bit)), np.int32(0)
        for i in range(number):
            held += np.int32(1) if ranks[i] >= tried else np.int32(0)
        last = tried if held >= budget else last
    return last


@njit
def keep_best(ranks, number, last, budget, found):
    """Keep, in order, the listed keys above the last rank, and the first ones of that rank."""
    kept, equal = np.int64(0), np.int64(budget)
    for i in range(number):
        equal -= ranks[i] > last
    for i in range(number):
        takes = ranks[i] > last or (ranks[i] == last and equal > 0)
        equal -= ranks[i] == last
        found[kept] = found[i]
        kept += takes
