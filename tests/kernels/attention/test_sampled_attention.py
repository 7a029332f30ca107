"""SampleAttention's scores against their definition in float64."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reference import assert_close, attention_probabilities, random_attention

from sparsekv.kernels.attention.attention import sampled_attention, spaced_places


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_scores_are_the_mean_probability_of_each_key(softcap: float | None) -> None:
    query, keys, _ = random_attention()
    expected = attention_probabilities(query, keys, 0.125, softcap=softcap).mean((1, 2))
    assert_close(sampled_attention(query, keys, 0.125, softcap), expected, 1e-5)


@given(total=st.integers(1, 300), count=st.integers(1, 400))
def test_places_are_even_and_end_with_the_last(total: int, count: int) -> None:
    places = spaced_places(total, count)
    gaps = places.diff()
    assert len(places) == min(count, total)
    assert int(places[0]) >= 0
    assert int(places[-1]) == total - 1
    assert not len(gaps) or int(gaps.max() - gaps.min()) <= 1
