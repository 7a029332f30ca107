"""Queries, keys and values of each layer for reports."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sparsekv.formats.device import read_ahead
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import layer_file
from sparsekv.runtime.cache.kv_store import LayerRows

CHECKED_AHEAD = 8  # layers whose files are checked while one is measured


def checked_rows(
    artifact: Artifact, names: Iterable[str], layers: list[int], device: torch.device
) -> Iterator[LayerRows]:
    """Yield the keys and values of each layer on a device. The next layer is prefetched.

    Threads verify the checksums of several layers at once, because a GPU measures a layer faster than one core hashes
    the layer's keys.

    Args:
        names: methods whose files are checked too.

    Raises:
        ArtifactError: the content of a file has changed.
    """
    names = list(names)

    def check(layer: int) -> int:
        artifact.check_sums(measured_files(artifact, names, [layer]))
        return layer

    def read(layer: int) -> LayerRows:
        rows = LayerRows(artifact, layer)
        rows.on(device)
        return rows

    return read_ahead(read_ahead(layers, check, CHECKED_AHEAD), read, 1)


def measured_files(artifact: Artifact, names: Iterable[str], layers: Iterable[int]) -> list[str]:
    """Return the names of the index's files that a measurement of methods on some layers reads."""
    folders = ["context", "queries", *(name for name in names if name in artifact.manifest.methods)]
    return [layer_file(folder, layer) for folder in folders for layer in layers]


@dataclass(frozen=True)
class QueryBlock:
    """Q queries of one layer. Each attends to all sinks, all tokens between sinks and tail, and some later tokens.

    Attributes:
        queries: [Hq, Q, D].
        keys, values: [Hk, E, D], of E new tokens after the tail. Queries of the tail have none (E = 0).
        visible: [Q], number of tail and new tokens that each query attends to.
        sink_logits: [Hq], logits of learned attention sinks; None if the model has none.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor
    sink_logits: torch.Tensor | None

    def part(self, queries: slice, device: torch.device) -> "QueryBlock":
        sinks = None if self.sink_logits is None else self.sink_logits.to(device)
        asked, visible = self.queries[:, queries].to(device), self.visible[queries].to(device)
        return QueryBlock(asked, self.keys.to(device), self.values.to(device), visible, sinks)


def tail_block(artifact: Artifact, layer: int, *, calibration: bool = False) -> QueryBlock:
    """Return the queries of the tail's second half (held out), or with `calibration` of the tail's first half."""
    stored, tail = artifact.queries(layer), artifact.manifest.split.tail
    keys, values = artifact.context_rows(layer).part(slice(0, 0))
    first, stop = (0, tail // 2) if calibration else (tail // 2, tail)
    return QueryBlock(
        queries=stored["tail"][:, first:stop],
        keys=keys,
        values=values,
        visible=torch.arange(first, stop) + 1,
        sink_logits=stored.get("sink_logits"),
    )


def seen_block(artifact: Artifact, layer: int) -> QueryBlock | None:
    """Read the last T / 2 of the document's queries from which the index was built; T is the number of tail tokens.

    Measurements place these queries directly after the middle. Returns None if the index stores no queries.
    """
    name = layer_file("samples", layer)
    if name not in artifact.manifest.files:
        return None
    keys, values = artifact.context_rows(layer).part(slice(0, 0))
    queries = artifact.tensors(name)["queries"][:, -(artifact.manifest.split.tail // 2) :]
    return QueryBlock(
        queries=queries,
        keys=keys,
        values=values,
        visible=torch.zeros(queries.shape[1], dtype=torch.int64),
        sink_logits=artifact.queries(layer).get("sink_logits"),
    )


class MeasuredQueries:
    """The queries of a report, from the tail or from questions. `blocks(layer)` returns the queries of one layer.

    Args:
        given: for each layer, the blocks of the questions' queries, such as one block for each question; None: measure
            on the held-out queries of the tail.
        apart: whether each query of a block is of another question. Otherwise a block's queries are consecutive.
    """

    def __init__(
        self, artifact: Artifact, given: Mapping[int, Sequence[QueryBlock]] | None = None, *, apart: bool = False
    ):
        self.artifact, self._given, self.apart = artifact, given, apart

    def blocks(self, layer: int) -> Sequence[QueryBlock]:
        return [tail_block(self.artifact, layer)] if self._given is None else self._given[layer]

    def __len__(self) -> int:
        return sum(block.queries.shape[1] for block in self.blocks(self.artifact.manifest.indexed_layers[0]))
