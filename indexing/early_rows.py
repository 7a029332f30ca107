"""Rows of a context that are written while its prefill goes on: a disk may be slower than that."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch

from sparsekv.formats.schema import LayerFacts, layer_file
from sparsekv.indexing.capture.capture import CapturedQueries, RowsDone
from sparsekv.indexing.capture.team import Captured, SharedRows
from sparsekv.indexing.context_files import ContextFiles
from sparsekv.indexing.plan import Build


@dataclass(frozen=True)
class EarlyRows:
    """What is done with rows as chunks are done, and with each layer after the last of them.

    Args:
        rows_done: as of `capture`.
    """

    rows_done: RowsDone

    def write_layer(self, captured: Captured, files: ContextFiles, layer: int, facts: LayerFacts) -> CapturedQueries:
        """Write what is missing of a layer's files; returns its queries. Raises ArtifactError as these do."""
        rows = captured.take(layer)
        files.write(layer, (rows.keys, rows.values), rows.queries, facts)
        return rows


@dataclass(frozen=True)
class RowsByAll(EarlyRows):
    """The same where each process of a team writes the rows of its heads, so that none need to be put together.

    Args:
        shared: how they do.
        names: the files that they write.
    """

    shared: SharedRows
    names: set[str]

    def write_layer(self, captured: Captured, files: ContextFiles, layer: int, facts: LayerFacts) -> CapturedQueries:
        name = layer_file("context", layer)
        queries, told = self.shared.end(layer, lambda seconds: name not in self.names or files.written(layer, seconds))
        files.end(layer, queries.queries, told)
        return queries


def early_rows(build: Build, missing: AbstractSet[str]) -> EarlyRows:
    """What of the context's `missing` files is written early, by whom.

    Nothing in 8 bits: the last block's scales are those of all of its tokens. Nothing either where another process of
    the team cannot open the files.

    Raises:
        ArtifactError: the files cannot be written.
    """
    files = [layer_file("context", layer) for layer in range(build.plan.num_hidden_layers)]
    names = [name for name in files if name in missing]

    def rows_done(layer: int, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        if (name := files[layer]) in missing:
            build.writer.write_rows(name, {"keys": keys, "values": values}, build.context_recipe, end, build.team.part)

    shared = build.team.shared_rows
    if build.plan.config.kv_dtype is None and shared is not None and _begun(build, shared, names):
        return RowsByAll(rows_done, shared, set(names))
    if build.plan.config.kv_dtype is None and build.team.has_all_heads:
        return EarlyRows(rows_done)
    return EarlyRows(lambda layer, keys, values, end: None)


def _begun(build: Build, shared: SharedRows, names: list[str]) -> bool:
    """Begin files for all processes of the team; returns whether they all write to them, and removes them if not."""
    files = {name: build.writer.share_rows(name, build.context_recipe) for name in names}
    begun = shared.share(build.writer.folder, files)
    if not begun:
        build.writer.unshare_rows()
    return begun
