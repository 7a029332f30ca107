"""Movement of a model's logits and rows by float32 rounding, which is much larger in loud models."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from typing import Any, TypeVar

import torch

from .oracles import ROUNDING, error_of, expect, plain
from .world import Rows, World

SIZE, PASSES = 1e-6, 8
"""Relative size of the movement of each output, and number of passes.

In 268 loud models float32 was at most 0.5 times as far from float64 as the moved passes were from the plain one. With
moved embeddings alone it was up to 3 times as far, because a large bias takes digits from its projection.
"""
SIDES = 2
"""Number of computations that are compared. Each rounds in its own way, and moves as far as the other."""
ALL = slice(None)
Pass = TypeVar("Pass")


class Rounding:
    """Limits of what rounding explains in a plain pass over token ids [N].

    The outputs of embeddings and linear layers are moved by `SIZE`, in `PASSES` passes. A limit is `SIDES` times the
    largest movement of these passes. Routing a token to one of two experts that are equally good is such a movement.
    """

    def __init__(self, world: World, ids: torch.Tensor):
        self.world, self.ids = world, ids

    def logits(self, last: int) -> float:
        """Largest relative error of the logits of the `last` tokens."""
        logits = plain(self.world, self.ids)[0][-last:]
        return SIDES * max(error_of(moved[-last:], logits) for moved, _ in self._moved())

    @cached_property
    def rows(self) -> dict[int, tuple[float, float]]:
        """Largest relative error of keys and of values, by layer."""
        rows, limits = plain(self.world, self.ids)[1], dict[int, tuple[float, float]]()
        for _, moved in self._moved():
            for layer, pair in rows.items():
                keys, values = (error_of(*both) for both in zip(moved[layer], pair, strict=True))
                before = limits.get(layer, (0.0, 0.0))
                limits[layer] = max(before[0], SIDES * keys), max(before[1], SIDES * values)
        return limits

    def layer(self, number: int | None) -> float:
        """Largest relative error of a layer's rows; of all layers' rows if it has none."""
        pairs = [self.rows[number]] if number in self.rows else self.rows.values()
        return max((max(pair) for pair in pairs), default=0.0)

    def expect_rows(self, actual: Rows, expected: Rows, most: float, kind: str, of: str) -> bool:
        """Raise Wrong if rows [Hk, N, D] differ by more than `most` and by more than rounding explains.

        Returns:
            whether all rows are within `most`.
        """
        expect(actual.keys() == expected.keys(), f"{kind} rows", f"of layers {[*actual]}, not {[*expected]}")
        within = True
        for layer, pair in actual.items():
            for number, name in enumerate(("keys", "values")):
                apart = error_of(pair[number], expected[layer][number])
                right = apart <= most or apart <= self.rows[layer][number]
                expect(right, f"{kind} {name}", f"of layer {layer} are {apart:.2e} from {of}")
                within = within and apart <= most
        return within

    def _moved(self) -> Iterator[tuple[torch.Tensor, Rows]]:
        """Yield logits and rows of plain passes in which outputs move at random."""
        return moved(self.world, lambda: plain(self.world, self.ids))


def moved(world: World, compute: Callable[[], Pass]) -> Iterator[Pass]:
    """Yield results of `compute` with a model whose embeddings' and linear layers' outputs move at random."""
    rounded = [world.model.get_input_embeddings()]
    rounded += [module for module in world.model.modules() if isinstance(module, torch.nn.Linear)]
    for seed in range(PASSES):
        random = torch.Generator().manual_seed(seed)

        def move(module: torch.nn.Module, given: Any, output: torch.Tensor, random: Any = random) -> torch.Tensor:
            return output * (1 + SIZE * torch.randn(output.shape, generator=random).to(output))

        with ExitStack() as hooks:
            for module in rounded:
                hooks.callback(module.register_forward_hook(move).remove)
            found = compute()
        yield found


def expect_logits(
    actual: torch.Tensor, oracle: Callable[[], torch.Tensor], world: World, kind: str, of: str, steps: slice = ALL
) -> None:
    """Raise Wrong if logits [T, vocabulary] differ by more than rounding explains from the `steps` of an oracle's.

    The oracle computes them anew, over the same rows, for each movement: over rows rounded to int8 two tokens may be
    equally good that are not so over other rows.
    """
    expected = oracle()[steps]
    apart = error_of(actual, expected)
    right = apart <= ROUNDING or apart <= movement(world, lambda: oracle()[steps], expected)
    expect(right, kind, f"{apart:.2e} from {of}")


def movement(world: World, oracle: Callable[[], torch.Tensor], expected: torch.Tensor) -> float:
    """Largest relative error of an oracle's logits that rounding explains."""
    return SIDES * max(error_of(one, expected) for one in moved(world, oracle))
