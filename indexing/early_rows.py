"""Rows of a context that are written while its prefill goes on: a disk may be slower than that."""

from dataclasses import dataclass

import torch

from sparsekv.formats.schema import LayerFacts, layer_file
from sparsekv.indexing.capture.capture import CapturedQueries, RowsDone
from sparsekv.indexing.capture.team import Captured
from sparsekv.indexing.context_files import ContextFiles
from sparsekv.indexing.plan import BuildJob


@dataclass(frozen=True)
class EarlyRows:
    """What is done with rows as chunks are done, and with each layer after the last of them.

    Args:
        rows_done: as of `capture`.
        by_all: whether each process of the team writes those of its heads, so that none need to be put together.
    """

    rows_done: RowsDone
    by_all: bool

    def write_layer(self, captured: Captured, files: ContextFiles, layer: int, facts: LayerFacts) -> CapturedQueries:
        """Write what is missing of a layer's files; returns its queries. Raises ArtifactError as these do."""
        if self.by_all:
            queries = captured.take_queries(layer)
            files.end(layer, queries.queries)
            return queries
        rows = captured.take(layer)
        files.write(layer, (rows.keys, rows.values), rows.queries, facts)
        return rows


def early_rows(job: BuildJob, recipe: str, missing: set[str]) -> EarlyRows:
    """What of the context's `missing` files is written early, by whom.

    Nothing in 8 bits: the last block's scales are those of all of its tokens. Nothing either where another process of
    the team cannot open the files.

    Raises:
        ArtifactError: the files cannot be written.
    """
    files = [layer_file("context", layer) for layer in range(job.plan.num_hidden_layers)]
    names, alone = missing.intersection(files), job.team.has_all_heads
    if job.plan.kv_dtype is not None or not (alone or _shared(job, names, recipe)):
        return EarlyRows(lambda layer, keys, values, end: None, by_all=False)

    def rows_done(layer: int, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        if (name := files[layer]) in names:
            job.writer.write_rows(name, {"keys": keys, "values": values}, recipe, end, job.team.part)

    return EarlyRows(rows_done, by_all=not alone)


def _shared(job: BuildJob, names: set[str], recipe: str) -> bool:
    """Begin files for all processes of the team; returns whether they all write to them, and removes them if not."""
    shared = job.team.share_files(job.writer.folder, {name: job.writer.share_rows(name, recipe) for name in names})
    if not shared:
        job.writer.unshare_rows()
    return shared
