"""A decode step by one kernel, choice and attention, against the one that chooses, gathers and attends."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.coded_layer import coded_layer
from support.configs import sparse
from support.random_tensors import normal
from support.reference import assert_close
from support.replaced import Step
from support.small_index import INDEXERS, build_small, random_ids, stepped_logits
from support.small_layer import SmallLayer, small_layer

from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import generate
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, Method

METHODS: dict[str, Method] = {
    "squeezed": Squeezed(),
    "multipole": Multipole(),
    "without replacement": Multipole(replace=False),
    "down levels": Squeezed("hierarchical"),
}


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=15)
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
    measured = Step(layer, selector, budget, seed=seed, sink_logits=sinks, gauge=True)
    assert_close(once.output, measured.output.double(), 5e-6)
    assert once.sparse.read.total() == measured.sparse.read.total()
    assert once.sparse.read.dense == measured.sparse.read.dense


@cache
def _coded() -> SmallLayer:
    layer, context = coded_layer(500, device=torch.device("cpu"))
    return replace(layer, context=context)


CODES = {"codes": Codes(), "without replacement": Codes(replace=False), "looked at again": Codes(rerank=2.0)}


@pytest.mark.parametrize("name", CODES)
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    budget=st.builds(Budget, st.integers(1, 600) | st.floats(0.01, 1.0)),
    has_sinks=st.booleans(),
)
def test_a_step_over_codes_gives_and_reads_what_the_choice_says(
    name: str, seed: int, budget: Budget, has_sinks: bool
) -> None:
    layer, sinks = _coded(), normal(seed, 2, 3) if has_sinks else None
    layer = replace(layer, queries=normal(seed, *layer.queries.shape))
    selector = CODES[name].prepare(layer.context)
    once = Step(layer, selector, budget, seed=seed, sink_logits=sinks)
    measured = Step(layer, selector, budget, seed=seed, sink_logits=sinks, gauge=True)
    assert_close(once.output, measured.output.double(), 1e-5)
    assert once.sparse.read.total() == measured.sparse.read.total()
    assert once.sparse.read.dense == measured.sparse.read.dense


def test_a_greedy_answer_is_the_one_that_torch_gives(tmp_path: Path) -> None:
    """Nearly all codes are all codes, because they are counted up, but they are read by torch; tokens are appended."""
    index = build_small(tmp_path / "small.skv", methods={"codes": INDEXERS["codes"]})
    question, tokens = question_ids(index, "What comes next?"), random_ids(20)
    for budget in (Budget(0.05), Budget(0.4), Budget(1.0)):
        caches = [index.cache(sparse("codes", Codes(scan=scan), budget)) for scan in (1.0, 0.9999)]
        answers = [generate(index, cache, question, Sampling(max_new_tokens=24)) for cache in caches]
        assert answers[0].text == answers[1].text
        assert answers[0].kv_fraction == pytest.approx(answers[1].kv_fraction)
        logits = [stepped_logits(index, cache, tokens, question=5) for cache in caches]
        assert_close(logits[0], logits[1].double(), 1e-5)
