"""Which centroid represents each token, of lookups down several levels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_layer import all_chosen, as_queries, small_layer

from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.selection.interface import Budget

LEVELS = {"flat": (0.2,), "two": (0.3, 0.1), "three": (0.4, 0.2, 0.1)}


@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS)
@settings(max_examples=20)
@given(seed=st.integers(0, 1000), budget=st.sampled_from([1, 10, 40, 199]), opened=st.sampled_from([1.0, 4.0]))
def test_a_centroid_has_as_many_tokens_as_it_counts(
    levels: tuple[float, ...], seed: int, budget: int, opened: float
) -> None:
    layer = small_layer(seed, levels=levels, block=150)
    selector = Multipole("flat" if len(levels) == 1 else "hierarchical", opened=opened).prepare(layer.context)
    selection = selector.select(as_queries(layer.queries[:, :, :1]), Budget(budget))
    parts = selection.attended_segments()
    assert selector.report.centroid_of is not None
    numbers, left = selector.report.centroid_of(parts), torch.ones(len(layer.keys), layer.split.middle)
    for head, (chosen,) in enumerate(all_chosen(selection, selector)):
        left[head, chosen] = 0
    counts = torch.cat([part.log_counts[:, 0] for part in parts], 1).exp()
    represented = torch.zeros_like(counts).scatter_add_(1, numbers, left)
    torch.testing.assert_close(represented, counts, rtol=1e-4, atol=1e-4)
