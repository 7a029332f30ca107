"""A few layers select tokens for all layers after them: the scheme that TidalDecode and LessIsMore share.

The first two layers attend to everything. So do the third and one about two fifths of the way up, which also rank the
middle's tokens by the attention that they compute anyway; every other layer attends to the best of the last ranking. A
layer that is measured without the layers before it finds no ranking, and makes its own by reading all keys.
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
from sparsekv.runtime.selection.queries import Queries, is_piece
from sparsekv.runtime.selection.selection import Cost, RowSet, Selection, single_rows

FULL_LAYERS = 2
RULE_OF_THUMB = 13 / 32  # the published code ranks again at layer 13 of 32
Rankings = dict[int, torch.Tensor]


@dataclass(frozen=True)
class LayerSharing(Method):
    """A method in which two layers rank tokens for the layers after them; those before them attend to everything."""

    select_layer: int = field(
        default=0,
        metadata={
            "help": "Layer, counted from 0, that attends to everything and selects the tokens for all layers after it; "
            "layer 2 selects for those between the two. 0: the layer at 13/32 of the model's depth."
        },
    )

    def __post_init__(self) -> None:
        if self.select_layer < 0 or 0 < self.select_layer <= FULL_LAYERS:
            raise UsageError(
                f"--select-layer {self.select_layer}: the first {FULL_LAYERS} layers attend to everything and the next "
                f"chooses; give {FULL_LAYERS + 1} or more, or 0 for one of 13 in 32"
            )

    def selecting_layers(self, position: LayerPosition) -> tuple[int, int]:
        """The two layers that rank; the same one twice in a model of few layers.

        Raises:
            UsageError: there is no such layer.
        """
        if self.select_layer >= position.layers:
            raise UsageError(
                f"--select-layer {self.select_layer}: the index has {position.layers} layers, counted from 0; give less"
            )
        return FULL_LAYERS, self.select_layer or max(FULL_LAYERS, round(RULE_OF_THUMB * position.layers))


class SharingSelector(Selector):
    """One layer's selector; keys [Hk, M, D]. Layers share int32 rankings by batch, which each decode step replaces."""

    def __init__(self, method: LayerSharing, context: MiddleContext, name: str):
        position = context.position
        self.keys, self.facts = context.keys, context.facts
        self.ranks = position.number in method.selecting_layers(position)
        self.full = self.ranks or position.number < FULL_LAYERS
        self.last = position.number == position.layers - 1
        self.rankings = cast(Rankings, position.shared.setdefault(name, {}))

    @abstractmethod
    def rank(self, queries: Queries) -> torch.Tensor:
        """The middle's tokens, best first: [Hk or 1, Q, M], or [Hk or 1, 1, M] for a joint selection."""

    def best(self, order: torch.Tensor, tokens: int) -> torch.Tensor:
        """The K tokens [..., K] to attend to, from a ranking [..., M]."""
        return order[..., :tokens]

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Everything in the first and the ranking layers, else the best of the last ranking."""
        if self.ranks:
            self.rankings[queries.batch] = self.rank(queries).int()
        if self.full:
            return self._everything(queries)
        order, index_rows = self.rankings.get(queries.batch), 0.0
        if self.last and is_piece(queries.batch):
            self.rankings.pop(queries.batch, None)  # nobody comes after this layer
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
