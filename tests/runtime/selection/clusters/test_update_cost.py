"""An update of the clusters while a model decodes costs the same however long the context is, in work, not time."""

from typing import Any

import torch
from support.random_tensors import normal
from support.small_layer import SmallLayer, small_layer, sparse_layer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.selection.interface import Budget

LEVELS, BLOCK, BUFFER, HEADS, GROUP, SIZE = (1 / 16,), 1024, 16, 2, 3, 16


class _Work(TorchDispatchMode):
    """Counts the elements of all tensors that operations take and give, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            leaves = tree_leaves((args, kwargs, result))
            self.elements += sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
        return result


def _sparse(layer: SmallLayer) -> SparseLayer:
    selector = Multipole(stream=True, buffer=BUFFER).prepare(layer.context)
    return sparse_layer(layer, selector, Budget(64))


def _work_of_updates(middle: int, steps: int) -> list[int]:
    """How much more a step that updates does than the step before it, for each of these steps that does."""
    layer = _sparse(small_layer(middle=middle, Hk=HEADS, G=GROUP, D=SIZE, levels=LEVELS, block=BLOCK))
    keys, values = normal(1, HEADS, steps, SIZE), normal(2, HEADS, steps, SIZE)
    before, updates = 0, []
    for step in range(steps):
        layer.update(keys[None, :, step : step + 1], values[None, :, step : step + 1])
        query, used = normal(step, HEADS * GROUP, 1, SIZE), layer.plan.middle.used
        with _Work() as work:
            layer.attend(AttentionCall(0, query, keys, values, 0.2, None, None, None))
        if layer.plan.middle.used > used:
            updates.append(work.elements - before)
        before = work.elements
    return updates


def test_an_update_at_64k_does_no_more_than_one_at_8k() -> None:
    """But for the first of all, which makes room behind the context by copying it: the count sees such a copy."""
    short, long = (_work_of_updates(middle, 5 * BUFFER) for middle in (8192, 65536))
    assert len(short) >= 4
    assert long[0] - long[1] > 6 * (short[0] - short[1]) > 0
    assert long[1:] == short[1:]
