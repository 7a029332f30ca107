"""A decode step by one kernel, choice and attention, against the one that chooses, gathers and attends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.reference import assert_close
from support.replaced import Step
from support.small_layer import small_layer

from sparsekv.runtime.attention.guard import MissedMeter
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import Method

METHODS: dict[str, Method] = {
    "squeezed": Squeezed(),
    "multipole": Multipole(),
    "without replacement": Multipole(replace=False),
    "down levels": Squeezed("hierarchical"),
}


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    middle=st.integers(30, 200),
    G=st.integers(1, 8),
    budget=st.builds(Budget, st.integers(1, 250) | st.floats(0.01, 1.0)),
    softcap=st.sampled_from([None, 3.0]),
    has_sinks=st.booleans(),
)
def test_a_step_gives_and_reads_what_the_choice_says(
    name: str, seed: int, middle: int, G: int, budget: Budget, softcap: float | None, has_sinks: bool
) -> None:
    """A layer that is measured has to look at the choice itself."""
    layer = small_layer(seed, middle=middle, G=G, softcap=softcap, block=100)
    selector, sinks = METHODS[name].prepare(layer.context), normal(seed, 2, G) if has_sinks else None
    once = Step(layer, selector, budget, seed=seed, sink_logits=sinks)
    measured = Step(layer, selector, budget, seed=seed, sink_logits=sinks, meter=MissedMeter(None))
    assert_close(once.output, measured.output.double(), 5e-6)
    assert once.sparse.read.total() == measured.sparse.read.total()
    assert once.sparse.read.dense == measured.sparse.read.dense
