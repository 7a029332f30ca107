"""Choosing tokens in a few layers, for all layers after them: what TidalDecode and LessIsMore share.

The first two layers attend to everything, and so do the third and one about two fifths of the way up, which rank the
middle's tokens by the attention that they compute anyway; each other layer takes the best of the ranking before it. A
layer that finds no ranking, because it is measured without the layers before it, makes one of its own, for which it
reads all keys.
Layers are counted among those that are indexed; with three or fewer of them, all attend to everything.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import cast

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.context import LayerPosition, MiddleContext
from sparsekv.runtime.selection.interface import Method, Selector
from sparsekv.runtime.selection.queries import Queries
from sparsekv.runtime.selection.selection import Cost, RowSet, Selection, single_rows

FULL_LAYERS = 2
RULE_OF_THUMB = 13 / 32  # the layer that the published code ranks again at, in models of 32 layers
Rankings = dict[int, torch.Tensor]


@dataclass(frozen=True)
class LayerSharing(Method):
    """What chooses in a few layers for the others."""

    select_layer: int = field(
        default=0, metadata={"help": "Layer that chooses again for those after it, counted from 0; 0: 13 in 32."}
    )

    def __post_init__(self) -> None:
        if self.select_layer < 0 or 0 < self.select_layer <= FULL_LAYERS:
            raise UsageError(
                f"--select-layer {self.select_layer}: the first {FULL_LAYERS} layers attend to everything and the next "
                f"chooses; give {FULL_LAYERS + 1} or more, or 0 for one of 13 in 32"
            )

    def selecting_layers(self, position: LayerPosition) -> tuple[int, int]:
        """The two layers that rank, which are one in a model of few layers.

        Raises:
            UsageError: there is no such layer.
        """
        if self.select_layer >= position.layers:
            raise UsageError(
                f"--select-layer {self.select_layer}: the index has {position.layers} layers, counted from 0; give less"
            )
        return FULL_LAYERS, self.select_layer or max(FULL_LAYERS, round(RULE_OF_THUMB * position.layers))


class SharingSelector(Selector):
    """keys [Hk, M, D]. The layers share rankings, int32, by batch: a decode step replaces that of the step before."""

    def __init__(self, method: LayerSharing, context: MiddleContext, name: str):
        position = context.position
        self.keys, self.facts = context.keys, context.facts
        self.ranks = position.number in method.selecting_layers(position)
        self.full = self.ranks or position.number < FULL_LAYERS
        self.rankings = cast(Rankings, position.shared.setdefault(name, {}))

    @abstractmethod
    def rank(self, queries: Queries) -> torch.Tensor:
        """The middle's tokens, best first: [Hk, Q, M], or [Hk, 1, M] for a shared choice; 1 for Hk: all heads alike."""

    def best(self, order: torch.Tensor, tokens: int) -> torch.Tensor:
        """The tokens [..., K] to attend to by a ranking [..., M]."""
        return order[..., :tokens]

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Everything, or the best of the last ranking."""
        if self.ranks:
            self.rankings[queries.batch] = self.rank(queries).int()
        if self.full:
            return self._everything(queries)
        order, index_rows = self.rankings.get(queries.batch), 0.0
        if order is None:
            order, index_rows = self.rank(queries), float(self.keys.shape[1])
        tokens = budget.tokens(self.keys.shape[1])
        starts = self.best(order, tokens).expand(len(self.keys), -1, -1)
        return Selection(single_rows(starts), Cost(index_rows))

    def _everything(self, queries: Queries) -> Selection:
        Hk, _, Q, _ = queries.query.shape
        starts = torch.zeros(Hk, 1 if queries.joint else Q, 1, dtype=torch.int64, device=self.keys.device)
        middle = self.keys.shape[1]
        return Selection(RowSet(starts, starts + middle, middle), Cost(0.0))
