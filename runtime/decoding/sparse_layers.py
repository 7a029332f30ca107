"""Make the sparse layers of one cache over an index. Each layer has a selector, keys and values, and a plan."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sparsekv.formats.device import release_pages
from sparsekv.formats.index.context_rows import Int8Stored
from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.formats.index.schema import Split
from sparsekv.runtime.attention.config import DecodeConfig, QuestionPrefill
from sparsekv.runtime.attention.executors import GatherMaker
from sparsekv.runtime.attention.plan import LayerParts, QuestionSearch, plan_layer
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.kv_store import (
    DiskRows,
    Int8Middle,
    LayerRows,
    MappedRows,
    MemoryRows,
    MiddleRows,
    Pair,
    of_tokens,
)
from sparsekv.runtime.decoding.prepare import PreparedLayer, PreparedMethod, prepare_layer
from sparsekv.runtime.selection.interface import (
    Budget,
    CentroidSegment,
    Cost,
    Method,
    MethodSpec,
    Queries,
    Residual,
    RowSet,
    Selection,
    Selector,
)


class EverythingSelector(Selector):
    """Selects all `middle` tokens between sinks and tail, for any budget, and reads no index.

    Rows are stored in order of position.
    """

    question_piece = 32

    def __init__(self, middle: int):
        self.middle = middle

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Return one run of all rows, which all queries share."""
        starts = torch.zeros(len(queries.query), 1, 1, dtype=torch.int64, device=queries.query.device)
        rows = RowSet(starts, torch.full_like(starts, self.middle), self.middle, self.middle)
        return Selection(rows, Cost(0.0), Residual(lambda: (_nothing(queries.query),), attended=False))


def _nothing(query: torch.Tensor) -> CentroidSegment:
    """Return one centroid that represents no token, so that the missed mass is measured as 0."""
    centroid = query.new_zeros(len(query), 1, query.shape[3])
    return CentroidSegment(centroid, centroid.new_full((len(query), 1, 1), -torch.inf, dtype=torch.float32), centroid)


def search_device(method: Method, placement: str, device: torch.device) -> torch.device:
    """Return the device that searches a method's tensors.

    The result is the CPU if `searched_on_host` is set and the placement is not `device`; otherwise the model's device.
    """
    return CPU if method.searched_on_host and placement != "device" else device


@dataclass
class SparseLayers:
    """Makes the sparse layers of one cache.

    Args:
        device, dtype: the model's device and dtype.
        take_rows: returns a layer's stored keys and values, which are released once the layer is made.
        prepared: the method of the answers, whose layers may be prepared already.
        split: the split of the prompt, possibly with an empty tail.
        gather_makers: returns, for a layer, the function that makes the executor of all of the layer's steps. None: the
            executors that `plan_layer` chooses.
        question_shared: the state that the layers of the question's method share.
    """

    artifact: Artifact
    device: torch.device
    dtype: torch.dtype
    take_rows: Callable[[int], LayerRows]
    prepared: PreparedMethod
    split: Split
    config: DecodeConfig
    gather_makers: Callable[[int], GatherMaker] | None
    question_shared: dict[str, Any] = field(default_factory=dict)

    def make(self, layer: int) -> SparseLayer:
        """Make one layer with its plan."""
        exact, parts = self.parts(layer)
        return SparseLayer(exact, self.split, plan_layer(parts, self.config))

    def parts(self, layer: int) -> tuple[Pair, LayerParts]:
        """Return one layer's keys and values of sinks and tail, and the inputs of the layer's plan.

        The placement decides where the rows between sinks and tail are stored.
        """
        rows, on_disk = self.take_rows(layer), self.config.placement == "disk"
        prepared = self.prepared.take(rows)
        # Layers that share state may need the selections of a layer that attends to all tokens.
        if layer < self.config.dense_layers and not prepared.context.position.shared:
            prepared = replace(prepared, selector=EverythingSelector(self.split.middle), mapped=())
        exact, middle = self._exact(rows), self._middle(rows, prepared)
        parts = LayerParts(
            number=layer,
            selector=prepared.selector,
            middle=middle,
            facts=self.artifact.manifest.attending[layer],
            sinks=self.split.sinks,
            heads=len(exact[0]),
            device=self.device,
            search_device=self.prepared.device,
            mapped=prepared.mapped if on_disk else (),
            question=self._question_search(rows, prepared.selector),
            gather_maker=None if self.gather_makers is None else self.gather_makers(layer),
        )
        # Release the pages that were read here: the selector may keep the file mapped, and mapped pages that are in
        # memory count as this process's memory.
        for tensor in (*rows.stored.tensors.values(), *parts.mapped) if on_disk else ():
            release_pages(tensor)
        rows.release()
        return exact, parts

    def _question_search(self, rows: LayerRows, decoding: Selector) -> QuestionSearch | None:
        question = self.config.question
        if not isinstance(question, QuestionPrefill):
            return None
        where, shared = search_device(question.method, self.config.placement, self.device), self.question_shared
        selector = prepare_layer(rows, MethodSpec(question.name, "", question.method), where, shared).selector
        return QuestionSearch(question, selector, where, decoding.layout)

    def _exact(self, rows: LayerRows) -> Pair:
        """Return the keys and values [Hk, sinks + tail, D] of sinks and tail."""
        sinks, end = self.split.sinks, self.split.sinks + self.split.middle
        parts = [rows.part(tokens, self._placed()) for tokens in (slice(sinks), slice(end, self.split.tokens))]
        keys, values = (torch.cat(both, 1) for both in zip(*parts, strict=True))
        return keys.to(self.device, self.dtype), values.to(self.device, self.dtype)

    def _placed(self) -> torch.device:
        """Return the device in whose memory the rows between sinks and tail are stored; the CPU for rows in files."""
        return self.device if self.config.placement == "device" else CPU

    def _middle(self, rows: LayerRows, prepared: PreparedLayer) -> MiddleRows:
        """Make the storage of the rows between sinks and tail (the middle), according to placement and device.

        Rows on a GPU stay in int8 if the index stores int8. Other rows for a model on a GPU share the keys with the
        selector if both need the keys in the order of positions on the same device.
        """
        layout, where = prepared.selector.layout, self._placed()
        if self.config.placement == "disk":
            return DiskRows(rows.artifact, rows.layer, layout, self.device, self.dtype)
        middle = slice(self.split.sinks, self.split.sinks + self.split.middle)
        if self.device.type == "cpu":
            return MappedRows(rows.stored, middle, layout, self.dtype)
        if where.type == "cuda" and isinstance(rows.stored_on(where), Int8Stored):
            order = None if layout is None else layout.to(where)
            return Int8Middle(of_tokens(rows.stored_on(where).tensors, middle), order, self.dtype)
        if layout is None and where == self.prepared.device:
            keys, values = prepared.context.keys, rows.middle("values", where)
        else:
            keys, values = rows.part(middle, where)
        order = None if layout is None else layout.to(where)
        return MemoryRows(keys.to(self.dtype), values.to(self.dtype), order, self.device)
