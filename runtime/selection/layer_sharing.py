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
from sparsekv.runtime.selection.interface import Asked, LayerPlace, Method, MiddleContext, Selection, Selector

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

    def selecting_layers(self, place: LayerPlace) -> tuple[int, int]:
        """The two layers that rank, which are one in a model of few layers.

        Raises:
            UsageError: there is no such layer.
        """
        if self.select_layer >= place.layers:
            raise UsageError(
                f"--select-layer {self.select_layer}: the index has {place.layers} layers, counted from 0; give less"
            )
        return FULL_LAYERS, self.select_layer or max(FULL_LAYERS, round(RULE_OF_THUMB * place.layers))


class SharingSelector(Selector):
    """keys [Hk, M, D]. On the board lie rankings, int32, by batch: a decode step replaces that of the step before."""

    def __init__(self, method: LayerSharing, context: MiddleContext, name: str):
        place = context.place
        self.keys, self.facts = context.keys, context.facts
        self.ranks = place.number in method.selecting_layers(place)
        self.full = self.ranks or place.number < FULL_LAYERS
        self.rankings = cast(Rankings, place.board.setdefault(name, {}))

    @abstractmethod
    def rank(self, asked: Asked) -> torch.Tensor:
        """The middle's tokens, best first: [Hk, Q, M], or [Hk, 1, M] for a shared choice; 1 for Hk: all heads alike."""

    def best(self, order: torch.Tensor, tokens: int) -> torch.Tensor:
        """The tokens [..., K] to attend to by a ranking [..., M]."""
        return order[..., :tokens]

    def select(self, asked: Asked, budget: Budget) -> Selection:
        """Everything, or the best of the last ranking."""
        if self.ranks:
            self.rankings[asked.batch] = self.rank(asked).int()
        if self.full:
            return self._everything(asked)
        order, index_rows = self.rankings.get(asked.batch), 0.0
        if order is None:
            order, index_rows = self.rank(asked), float(self.keys.shape[1])
        tokens = budget.tokens(self.keys.shape[1])
        starts = self.best(order, tokens).expand(len(self.keys), -1, -1)
        return Selection(starts, torch.ones_like(starts), tokens, index_rows)

    def _everything(self, asked: Asked) -> Selection:
        Hk, _, Q, _ = asked.query.shape
        starts = torch.zeros(Hk, 1 if asked.shared else Q, 1, dtype=torch.int64, device=self.keys.device)
        middle = self.keys.shape[1]
        return Selection(starts, starts + middle, middle, 0.0)
