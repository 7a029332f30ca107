"""Matching prompts with indices, in whole blocks, and the trial of an index that no request has loaded yet."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.runtime.vllm.prefixes import RUN, Prefix, PrefixTable

BLOCK = 16
MANUAL = list(range(100, 200))  # 100 tokens: six blocks and four tokens
QUESTION = [7] * 5


def table(**prompts: list[int]) -> PrefixTable:
    return PrefixTable(prompts or {"manual": MANUAL}, BLOCK)


def trusted(**prompts: list[int]) -> PrefixTable:
    found = table(**prompts)
    for name in prompts or ("manual",):
        found.trust(name)
    return found


def test_a_trusted_index_gives_all_whole_blocks() -> None:
    assert trusted().longest(MANUAL + QUESTION) == Prefix("manual", 96, range(0))


def test_the_first_request_computes_some_tokens_of_the_index_itself() -> None:
    """Four tokens behind the last whole block are too few to compare: a block less is loaded."""
    assert table().longest(MANUAL + QUESTION) == Prefix("manual", 80, range(80, 80 + RUN))


def test_an_index_that_is_not_trusted_any_more_is_compared_again() -> None:
    found, first = trusted(), table().longest(MANUAL)
    found.distrust()
    assert not found.trusts("manual")
    assert found.longest(MANUAL) == first
    assert first is not None
    found.begin("request", first)
    found.distrust()
    assert not found.waits(MANUAL)


@pytest.mark.parametrize("tokens", [96, 97, 100])
def test_a_prompts_last_token_is_never_loaded(tokens: int) -> None:
    prefix = trusted().longest(MANUAL[:tokens])
    assert prefix is not None
    assert prefix.loaded == (80 if tokens == 96 else 96)


def test_a_document_that_only_begins_like_an_index_gets_what_they_share() -> None:
    assert trusted().longest(MANUAL[:50] + [0] * 400) == Prefix("manual", 48, range(0))


@pytest.mark.parametrize("prompt", [[0, *MANUAL], MANUAL[:15], [], MANUAL[:15] + QUESTION])
def test_less_than_a_block_is_not_loaded(prompt: list[int]) -> None:
    assert table().longest(prompt) is None
    assert trusted().longest(prompt) is None


def test_of_several_indices_the_longest_is_taken() -> None:
    found = trusted(short=MANUAL[:40], long=MANUAL, other=[1] * 100)
    assert found.longest(MANUAL + QUESTION) == Prefix("long", 96, range(0))
    assert found.longest([1] * 100) == Prefix("other", 96, range(0))


def test_a_refused_index_is_never_loaded() -> None:
    found = table(short=MANUAL[:40], long=MANUAL)
    assert found.refuse("long")
    assert not found.refuse("long")
    prefix = found.longest(MANUAL)
    assert prefix is not None
    assert prefix.index == "short"


def test_during_a_trial_requests_that_would_share_its_blocks_or_begin_another_wait() -> None:
    found = table(manual=MANUAL, other=[1] * 100)
    prefix = found.longest(MANUAL)
    assert prefix is not None
    found.begin("request", prefix)
    assert found.waits(MANUAL[:20] + QUESTION)
    assert found.waits([1] * 100)
    assert not found.waits([2] * 100)
    assert not found.waits(MANUAL[:15])
    found.trust("other")  # the result of an earlier trial
    assert found.waits(MANUAL)
    assert not found.waits([1] * 100)
    found.trust("manual")
    assert not found.waits(MANUAL)


def test_the_longest_index_that_is_whole_in_a_prompt() -> None:
    found = table(manual=MANUAL, chapter=MANUAL[:40], other=[1] * 50)
    assert found.whole(MANUAL + QUESTION) == "manual"
    assert found.whole(MANUAL) == "manual"
    assert found.whole(MANUAL[:99] + QUESTION) == "chapter"
    assert found.whole(MANUAL[:39] + QUESTION) is None
    found.refuse("manual")
    assert found.whole(MANUAL + QUESTION) == "chapter"


def test_an_unfinished_trial_is_repeated() -> None:
    found = table()
    prefix = found.longest(MANUAL)
    assert prefix is not None
    found.begin("request", prefix)
    found.end_trial("manual")
    assert not found.waits(MANUAL)
    assert found.longest(MANUAL) == prefix


@given(
    shared=st.integers(0, 100),
    more=st.integers(0, 40),
    block=st.sampled_from([8, 16, 32, 128]),
    trust=st.booleans(),
)
def test_only_shared_tokens_are_loaded_and_compared(shared: int, more: int, block: int, trust: bool) -> None:
    found, prompt = PrefixTable({"manual": MANUAL}, block), MANUAL[:shared] + [0] * more
    if trust:
        found.trust("manual")
    prefix = found.longest(prompt)
    if prefix is None:
        assert shared < block + RUN
        return
    assert prefix.loaded % block == 0
    assert 0 < prefix.loaded < len(prompt)
    assert max(prefix.loaded, prefix.compared.stop) <= shared
    assert prefix.compared == (range(0) if trust else range(prefix.loaded, prefix.loaded + RUN))
