"""A question's tokens that attend in place, against those that attend to copies of what they choose."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.reference import assert_close
from support.small_layer import small_layer, sparse_layer

from sparsekv.kernels.attention.attention import Segment, attend
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.attention import executors
from sparsekv.runtime.attention.executors import GatherExecutor, QuestionExecutor, Step, step_of
from sparsekv.runtime.cache.kv_store import MemoryRows, Pair
from sparsekv.runtime.methods.magicpig import MagicPIG
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.methods.sparq import SparQ
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, Method, Selector

IN_PLACE: dict[str, Method] = {
    "squeezed": Squeezed(),
    "multipole": Multipole(),
    "without replacement": Multipole(replace=False),
    "down levels": Squeezed("hierarchical"),
    "by threshold": Squeezed(selection="threshold"),
    "oracle": Oracle(),
}
COPIED: dict[str, Method] = {
    "several levels": Multipole("hierarchical"),
    "sampled": MagicPIG(),
    "a mean for each token": SparQ(mean_value=True),
}
METHODS = IN_PLACE | COPIED


class Uncopied(MemoryRows):
    """Rows that nobody may copy."""

    def gather(self, rows: torch.Tensor) -> Pair:
        raise AssertionError("rows were copied")


def _asked(
    method: Method, seed: int, middle: int, G: int, queries: int, softcap: float | None, *, has_sinks: bool
) -> tuple[Selector, MemoryRows, Step]:
    """A method's selector for a layer, the layer's rows, and the step of a question's tokens."""
    layer = small_layer(seed, middle=middle, G=G, softcap=softcap)
    selector = method.prepare(layer.context)
    new = normal(seed, 2, queries, 16), normal(seed + 1, 2, queries, 16)
    sparse = sparse_layer(layer, selector, Budget(1))
    sparse.update(new[0][None], new[1][None])
    sinks = normal(seed, 2 * G) if has_sinks else None
    call = AttentionCall(0, normal(seed + 2, 2 * G, queries, 16), *new, 0.2, softcap, None, sinks)
    rows = sparse.plan.middle
    assert isinstance(rows, MemoryRows)
    return selector, rows, step_of(sparse, call)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    middle=st.integers(30, 200),
    G=st.integers(1, 8),
    queries=st.integers(2, 9),
    piece=st.integers(1, 9),
    budget=st.builds(Budget, st.integers(1, 250) | st.floats(0.01, 1.0)),
    softcap=st.sampled_from([None, 3.0]),
    has_sinks=st.booleans(),
)
def test_a_question_attends_in_place_as_it_does_to_copies(
    name: str, seed: int, middle: int, G: int, queries: int, piece: int, budget: Budget, softcap: float | None,
    has_sinks: bool,
) -> None:  # fmt: skip
    selector, rows, step = _asked(METHODS[name], seed, middle, G, queries, softcap, has_sinks=has_sinks)
    kept = (Uncopied if name in IN_PLACE else MemoryRows)(rows.keys.rows, rows.values.rows, None, rows.device)
    copying = GatherExecutor(selector, rows, rows.device)
    in_place = QuestionExecutor(selector, kept, rows.device)
    for some in step.pieces(piece):
        expected, found = (executor.attend(some, budget) for executor in (copying, in_place))
        assert_close(found.output, expected.output.double(), 1e-5)
        assert torch.equal(torch.as_tensor(found.rows_read), torch.as_tensor(expected.rows_read))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    middle=st.integers(1, 200),
    G=st.integers(1, 8),
    queries=st.integers(1, 9),
    softcap=st.sampled_from([None, 3.0]),
    has_sinks=st.booleans(),
    most=st.sampled_from([1, 3000, executors.MOST_LOGITS]),
)
def test_a_question_that_attends_to_everything_is_the_plain_models(
    seed: int, middle: int, G: int, queries: int, softcap: float | None, has_sinks: bool, most: int
) -> None:
    """In place, and by copies for some of its tokens at a time."""
    selector, rows, step = _asked(Oracle(), seed, middle, G, queries, softcap, has_sinks=has_sinks)
    kept = Uncopied(rows.keys.rows, rows.values.rows, None, rows.device)
    pairs = rows.from_row(0), (step.keys, step.values)
    everything = [
        Segment(*(one.double() for one in pair), mask) for pair, mask in zip(pairs, (None, step.mask), strict=True)
    ]
    expected = attend(step.query.double(), everything, *step.how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "MOST_LOGITS", most)
        for executor in (GatherExecutor(selector, rows, rows.device), QuestionExecutor(selector, kept, rows.device)):
            assert_close(executor.attend_to_everything(step), expected, 1e-5)
