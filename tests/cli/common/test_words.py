"""Words of tokens: what a person reads in a cluster."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import tiny_tokenizer
from support.tokenizers_of_families import tokenizer_of

from sparsekv.cli.inspecting.tables import telling_words, words_of


def test_each_token_stands_in_its_word() -> None:
    """The tiny tokenizer has one token a byte."""
    text = "two words,  and\nmore"
    words = words_of(tiny_tokenizer(), tiny_tokenizer()(text).input_ids)
    assert len(words) == len(text)
    assert words[:3] == ["two"] * 3
    assert words[4:9] == ["words"] * 5
    assert words[9:12] == [",", "' '", "' '"]
    assert words[15] == "'\\n'"
    assert words[-1] == "more"


@pytest.mark.parametrize("kind", ["llama-2", "mistral", "qwen"])
def test_words_do_not_run_into_each_other(kind: str) -> None:
    """Tokenizers of SentencePiece drop the space at the start of a text, and so of a token alone."""
    tokenizer = tokenizer_of(kind)
    words = words_of(tokenizer, tokenizer("a list and the other list", add_special_tokens=False).input_ids)
    assert [*dict.fromkeys(words)] == ["a", "list", "and", "the", "other"]


def test_no_tokens_have_no_words() -> None:
    assert words_of(tiny_tokenizer(), []) == []


def test_a_word_that_is_common_everywhere_tells_less() -> None:
    words = ["the"] * 60 + ["exception"] * 3 + ["other"] * 40
    told = telling_words(words, [0, 1, 2, 3, 60, 61, 62])
    assert list(told) == ["exception", "the"]
    assert told == {"exception": 3, "the": 4}


@given(st.lists(st.sampled_from("abcd"), min_size=1), st.data())
def test_every_position_is_counted_once(words: list[str], data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=1, unique=True))
    told = telling_words(words, positions)
    assert sum(told.values()) == len(positions)
    assert {word: [words[p] for p in positions].count(word) for word in told} == told
