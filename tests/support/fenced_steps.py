"""Program of compiled decode steps over fenced tensors: a read past a tensor ends the process."""

import ctypes
from dataclasses import replace

import torch

from support import cluster_steps as of_clusters
from support import code_steps as of_codes
from support.fenced import fenced
from support.kernel_runs import with_threads
from support.odd_numbers import KINDS, odd


def read_past(past: int, *, behind: bool) -> None:
    """Read a number at `past` bytes from the beginning of a fenced tensor of five numbers of 8 bytes each."""
    tensor = fenced(torch.arange(5), behind=behind)
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    _ = ctypes.c_long.from_address(tensor.data_ptr() + past).value


def code_steps() -> None:
    """Run steps over codes, with numbers of every kind in KINDS."""
    for behind in (False, True):
        for kind in KINDS:
            step = of_codes.some_step(5, H=2, D=20, m=5, C=13, E=6, softcap=2.0 if behind else None)
            codes, M = step.codes, step.codes.codes.shape[1]
            held = (one[:, :M] for one in step.rows)
            names = ["books", "turn", "centroids", "masses", "values"]
            query, *wide = odd(kind, step.query, *(getattr(codes, name) for name in names), *held, *step.exact)
            query, *wide = (fenced(one, behind=behind) for one in (query, *wide))
            numbers = {name: fenced(getattr(codes, name), behind=behind) for name in ("codes", "labels", "counts")}
            codes = replace(codes, **numbers, **dict(zip(names, wide, strict=False)))
            pairs = {"rows": tuple(wide[5:7]), "exact": tuple(wide[7:])}
            assert codes.compiled is not None
            for threads in (1, 3):
                with with_threads(threads):
                    for budget in (1, 9, M):
                        replace(step, query=query, codes=codes, budget=budget, **pairs).attend()


def cluster_steps() -> None:
    """Run steps over clusters, with numbers of every kind in KINDS."""
    for behind in (False, True):
        for kind in KINDS:
            step = of_clusters.some_step(5, H=2, D=20, C=13, E=6)
            counted, clusters = step.clusters.counted, step.clusters
            held = (one[:, : counted.tokens] for one in step.rows)
            query, centroids, stands, *rows = odd(
                kind, step.query, counted.centroids, clusters.values, *held, *step.exact
            )
            centroids, stands, query, *rows = (fenced(one, behind=behind) for one in (centroids, stands, query, *rows))
            numbers = {name: fenced(getattr(counted, name), behind=behind) for name in ("counts", "log_counts")}
            starts = fenced(clusters.starts, behind=behind)
            counted = replace(counted, centroids=centroids, **numbers)
            clusters = replace(clusters, counted=counted, starts=starts, values=stands)
            assert clusters.compiled is not None
            for threads in (1, 3):
                with with_threads(threads):
                    for replaced in (False, True):
                        pairs = {"rows": tuple(rows[:2]), "exact": tuple(rows[2:])}
                        replace(step, query=query, clusters=clusters, replace=replaced, **pairs).attend("compiled")
