"""Searching a step ahead: each decode step attends to what the query of the step before asked for."""

from dataclasses import replace

import pytest
import torch
from support.random_tensors import normal
from support.small_layer import SmallLayer, small_layer, sparse_layer

from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.attention.prefetch import Found, tensors_in
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.methods.magicpig import MagicPIG
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import Asked, Method, Selection, Selector, Taken

METHODS: dict[str, Method] = {
    "squeezed": Squeezed("hierarchical"),
    "multipole": Multipole("hierarchical"),
    "multipole that streams": Multipole(stream=True, buffer=4),
    "quest": Quest(page_size=5),
}
STEPS = 14


def test_what_lies_in_a_choice_is_protected_whatever_it_is() -> None:
    """From being let go of while another stream still reads it: the weights of what was drawn, too."""
    layer = small_layer(middle=60)
    step = Asked(layer.queries[:, :, :1], lambda: torch.arange(1), lambda: torch.zeros(2, 3, 1), shared=False)
    drawn = MagicPIG(hash_bits=2).prepare(layer.context).select(step, Budget(8))
    stood_for = Multipole().prepare(small_layer(middle=60, block=64).context).select(step, Budget(8))
    assert drawn.log_weights is not None
    part = stood_for.replacements[0]
    keys, values, valid = (torch.zeros(1) for _ in range(3))
    for chosen, among in ((drawn, [drawn.log_weights]), (stood_for, [part.keys, part.values, part.log_counts])):
        found = {id(tensor) for tensor in tensors_in(Found(chosen, keys, values, valid))}
        assert found >= {id(tensor) for tensor in (keys, values, valid, chosen.starts, chosen.lengths, *among)}


class _Late(Selector):
    """Another selector, asked with the queries of the decode step before, if nothing was taken in between."""

    def __init__(self, inner: Selector):
        self.inner, self.token_order, self.takes = inner, inner.token_order, inner.takes
        self.before: Asked | None = None

    @property
    def open_row(self) -> int:  # type: ignore[override]
        return self.inner.open_row

    def select(self, asked: Asked, budget: Budget) -> Selection:
        if asked.shared:
            return self.inner.select(asked, budget)
        late, self.before = self.before or asked, asked
        chosen = self.inner.select(late, budget)
        # Logits that choosing computed are those of another query than is attended with.
        return replace(chosen, replacements=tuple(replace(part, at_once=None) for part in chosen.replacements))

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> Taken:
        self.before = None
        return self.inner.take(keys, values)

    def forget(self) -> torch.Tensor | None:
        self.before = None
        return self.inner.forget()


def _decode(layer: SmallLayer, sparse: SparseLayer) -> list[torch.Tensor]:
    """A question of three tokens, then one token a step."""
    facts, (Hk, G, _, D) = layer.context.facts, layer.queries.shape
    sparse.rewind()
    outputs = []
    for step, tokens in enumerate([3] + [1] * STEPS):
        keys, values, query = (
            normal(10 * step + part, heads, tokens, D) for part, heads in enumerate((Hk, Hk, Hk * G))
        )
        sparse.update(keys[None], values[None])
        call = AttentionCall(0, query, keys, values, facts.softmax_scale, facts.softcap, None, None)
        outputs.append(sparse.attend(call))
    return outputs


@pytest.mark.parametrize("method", METHODS)
def test_a_step_attends_to_what_the_one_before_asked_for(method: str) -> None:
    layer = small_layer(3, block=None if method == "squeezed" else 64)
    late = sparse_layer(layer, _Late(METHODS[method].prepare(layer.context)), Budget(9))
    ahead = sparse_layer(layer, METHODS[method].prepare(layer.context), Budget(9), ahead=True)
    at_once = sparse_layer(layer, METHODS[method].prepare(layer.context), Budget(9))
    expected = _decode(layer, late)
    for _ in range(2):
        for got, wanted in zip(_decode(layer, ahead), expected, strict=True):
            assert torch.equal(got, wanted)
        assert ahead.read.total() == late.read.total()
    assert not all(torch.equal(a, b) for a, b in zip(_decode(layer, at_once), expected, strict=True))
