"""Text as it is decoded: the pieces together are the text."""

import random
from copy import deepcopy
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import tiny_tokenizer
from support.tokenizers_of_families import BYTES, KINDS, tokenizer_of
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from sparsekv.runtime.decoding.answer import Streamer, decoded
from sparsekv.runtime.sources.places import TokenDecoder

WORDS = ["<s>", "</s>", "def", "\u2581f", ":", "\n", "\u2581\u2581\u2581\u2581", "return", "\u2581x", "\u2581"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One that decodes as SentencePiece's: of what is decoded together, the first space goes."""
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<s>"))
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    "words",
    [
        [
            "def",
            "\u2581f",
            ":",
            "\n",
            "\u2581\u2581\u2581\u2581",
            "return",
            "\u2581x",
            "\n",
            "\u2581\u2581\u2581\u2581",
            "return",
            "</s>",
        ],
        ["def", "\n", "</s>", "\u2581", "\u2581x", "\n", "\n", "\u2581x"],
        ["\n", "\u2581x"],
        [],
    ],
)
def test_the_pieces_of_a_text_are_the_text(tokenizer: PreTrainedTokenizerFast, words: list[str]) -> None:
    ids, pieces = [WORDS.index(word) for word in words], list[str]()
    streamer = Streamer(tokenizer, pieces.append)
    for one in ids:
        streamer.put(one)
    streamer.end()
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


@st.composite
def answers(draw: st.DrawFn) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """A tokenizer, and tokens with runs of bytes, of which some are no characters, and with tokens without a text."""
    tokenizer = tokenizer_of(draw(st.sampled_from(list(KINDS))))
    known = tokenizer.get_vocab()
    without = st.sampled_from([*tokenizer.added_tokens_decoder, len(tokenizer)])
    part = (st.integers(0, len(tokenizer)) | without).map(lambda one: [one])
    if BYTES[0] in known:
        written = st.sampled_from("y\n\u00e9\u05e9\u20ac\U0001f600").map(str.encode) | st.binary(min_size=1, max_size=2)
        part |= written.map(lambda some: [known[BYTES[one]] for one in some])
    return tokenizer, list(chain.from_iterable(draw(st.lists(part, max_size=30))))


@given(answers())
def test_any_tokens_stream_as_they_decode(answer: tuple[PreTrainedTokenizerFast, list[int]]) -> None:
    """The token after a run of bytes brings the run's text, and no other token but a character's first ones waits."""
    (tokenizer, ids), pieces = answer, list[str]()
    streamer, waits = Streamer(tokenizer, pieces.append), False
    for place, one in enumerate(ids, 1):
        streamer.put(one)
        if one < len(tokenizer) and one not in tokenizer.added_tokens_decoder:
            waits = tokenizer.convert_ids_to_tokens(one) in BYTES
        if not waits:
            shown = str(tokenizer.decode(ids[:place], skip_special_tokens=True))
            assert "".join(pieces) == shown.rstrip("\ufffd")
    streamer.end()
    assert "".join(pieces) == decoded(tokenizer, ids)


def test_spaces_that_transformers_would_clean_up_stay() -> None:
    """`decode` makes "n't" from " n't", also from tokens whose text is streamed already."""
    tokenizer, pieces = deepcopy(tokenizer_of("unigram chatml")), list[str]()
    tokenizer.clean_up_tokenization_spaces = True
    ids = tokenizer("it is n't , so he 's here .", add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == "it isn't, so he's here."
    streamer = Streamer(tokenizer, pieces.append)
    for one in ids:
        streamer.put(one)
    streamer.end()
    assert "".join(pieces) == decoded(tokenizer, ids) == "it is n't , so he 's here ."


@given(answers(), st.integers(0, 30))
def test_texts_of_any_tokens_join_to_the_text_of_all(
    answer: tuple[PreTrainedTokenizerFast, list[int]], cut: int
) -> None:
    tokenizer, ids = answer
    decoder = TokenDecoder(tokenizer, skip_special_tokens=True)
    first = decoder.put(ids[:cut])
    settled = first[: len(first) - len(decoder.waiting)]
    assert len(first) == len(ids[:cut])
    assert "".join([*settled, *decoder.put(ids[cut:])]) == decoded(tokenizer, ids)


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes", "byte fallback"])
def test_a_long_line_is_decoded_in_parts(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    chosen, longest = random.Random(0), 0
    if kind != "sentencepiece":
        tokenizer = tiny_tokenizer() if kind == "bytes" else tokenizer_of("llama-2")
        joined, hebrew = "\U0001f469\U0001f3fd\u200d\U0001f680", "\u05e9\u05dc\u05d5\u05dd"
        words = ["word ", "\u00e9t\u00e9 ", "\u5b57", "\U0001f600", ". ", "a", joined, hebrew]
        text = "".join(chosen.choice(words) for _ in range(300))
        ids = tokenizer(text, add_special_tokens=False).input_ids
    else:
        ids = [chosen.choice([2, 3, 4, 6, 7, 8, 9]) for _ in range(300)]
    pieces = list[str]()
    streamer = Streamer(tokenizer, pieces.append)
    for one in ids:
        streamer.put(one)
        longest = max(longest, len(streamer.tokens))
    streamer.end()
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert longest <= 64


@pytest.mark.parametrize("before", [[], ["def"], ["def", "\n"]])
def test_special_tokens_are_not_decoded_again(tokenizer: PreTrainedTokenizerFast, before: list[str]) -> None:
    """A model may repeat one without end, and the others' questions would wait for the streamer."""
    streamer = Streamer(tokenizer, lambda text: None)
    for one in [WORDS.index(word) for word in before] + [0] * 40:
        streamer.put(one)
    assert len(streamer.tokens) == len(before[-1:])


@pytest.mark.parametrize("left_out", [1, 2, 3])
@pytest.mark.parametrize("kind", ["gemma", "llama-2", "qwen"])
def test_an_answer_that_ends_within_a_character_keeps_the_characters_before_it(kind: str, left_out: int) -> None:
    """Also of a tokenizer as Llama 2's, which decodes no byte of a run of bytes unless all of it is text."""
    tokenizer, pieces = tokenizer_of(kind), list[str]()
    ids = tokenizer("Say: \uac00\ub098\U0001f600", add_special_tokens=False).input_ids[:-left_out]
    streamer = Streamer(tokenizer, pieces.append)
    for one in ids:
        streamer.put(one)
    streamer.end()
    assert "".join(pieces) == decoded(tokenizer, ids) == "Say: \uac00\ub098\ufffd"
