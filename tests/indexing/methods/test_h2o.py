"""Accumulated attention: softmaxes over all that each query saw, summed over the sample, averaged over the group."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import normal
from support.reference import assert_close, attention_probabilities
from support.small_index import build_small
from support.small_layer import SINKS
from support.small_tables import layer_input

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.indexers.interface import choose_indexers
from sparsekv.indexing.methods.h2o import H2OIndexer

properties = settings(max_examples=15)


@properties
@given(
    seed=st.integers(0, 10**6),
    middle=st.integers(1, 60),
    sampled=st.integers(1, 60),
    softcap=st.sampled_from([None, 3.0]),
    learned_sinks=st.booleans(),
    at_once=st.sampled_from([1, 2000, 10**6]),
)
def test_scores_are_sums_of_probabilities_over_all_that_was_seen(
    seed: int, middle: int, sampled: int, softcap: float | None, learned_sinks: bool, at_once: int
) -> None:
    sampled = min(sampled, middle)
    given = layer_input(seed, middle=middle, positions=sampled)
    assert given.queries is not None
    Hk, G = 2, 2
    positions = SINKS + torch.randperm(middle, generator=torch.Generator().manual_seed(seed))[:sampled].sort().values
    given = replace(
        given,
        facts=given.facts.model_copy(update={"softcap": softcap}),
        positions=positions.int(),
        sink_keys=normal(seed + 7, Hk, SINKS, 16),
        sink_logits=normal(seed + 8, Hk * G) if learned_sinks else None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsekv.indexing.methods.h2o.LOGITS_AT_ONCE", at_once)
        scores = H2OIndexer().build_layer(given)["scores"]
    assert given.sink_keys is not None
    probability = attention_probabilities(
        given.queries.unflatten(0, (Hk, G)),  # type: ignore[union-attr]
        torch.cat([given.sink_keys, given.keys], 1),
        given.facts.softmax_scale,
        mask=torch.arange(SINKS + middle) <= positions[:, None],
        softcap=softcap,
        sink_logits=None if given.sink_logits is None else given.sink_logits.view(Hk, G),
    )
    assert scores.dtype == torch.float32
    assert_close(scores, probability.sum(2).mean(1)[:, SINKS:], 1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_a_whole_sample_sums_the_attention_that_the_model_computes(family: str, tmp_path: Path) -> None:
    index = build_small(tmp_path / "small.skv", family, methods={"h2o": H2OIndexer(query_sample=10_000)})
    index.model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = index.model(index.input_ids[None], output_attentions=True, use_cache=False).attentions
    middle = slice(index.split.sinks, index.split.sinks + index.split.middle)
    for layer in index.artifact.manifest.indexed_layers:
        scores = index.artifact.method_tensors("h2o", layer)["scores"]
        summed = attentions[layer][0].double()[:, middle, middle].sum(1)
        assert_close(scores, summed.unflatten(0, (len(scores), -1)).mean(1), 1e-4)


def test_it_is_built_when_it_is_named_alone() -> None:
    assert "h2o" not in choose_indexers([])
    assert choose_indexers(["h2o"]) == ["h2o"]


def test_a_sample_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="--query-sample 0: give at least 1"):
        H2OIndexer(query_sample=0)
