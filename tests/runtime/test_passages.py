"""The texts of a prompt's tokens, and the sentences that they are divided into."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.python_help import DOCUMENT
from support.tiny_models import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sparsekv.formats.models.load import LoadedModel
from sparsekv.runtime.sources.places import LONGEST, split_passages, token_texts

TEXT = (
    'He said: "Stop!" Then nothing. A caf\u00e9 costs 3.14 \U0001f511 euros \U0001f9d1\u200d\U0001f680.'
    "\n\n\u4f60\u597d\u3002Two."
)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Letters, visible spaces, and bytes for all characters that are in none: as Llama-2's."""
    pieces = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "\u2581said",
        "\u2581A",
        "s",
        "a",
        ".",
    ]
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.add_special_tokens(["<s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")


TOKENIZERS = {"byte-level": tiny_tokenizer, "SentencePiece": sentencepiece_tokenizer}
any_tokenizer = pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


@pytest.mark.parametrize("tokenizer", [make() for make in TOKENIZERS.values()], ids=TOKENIZERS)
@settings(max_examples=40)
@given(text=st.text(min_size=1))
def test_the_texts_of_tokens_join_to_the_text_of_all(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = _ids(tokenizer, text)
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@any_tokenizer
def test_a_character_of_several_tokens_is_the_text_of_the_last(make: object) -> None:
    assert callable(make)
    tokenizer = make()
    texts = token_texts(tokenizer, _ids(tokenizer, "a\U0001f511."))
    assert texts[-5:] == ["", "", "", "\U0001f511", "."]


def test_special_tokens_have_a_text() -> None:
    tokenizer = sentencepiece_tokenizer()
    assert token_texts(tokenizer, [1, *_ids(tokenizer, "sa a")]) == ["<s>", " ", "s", "a", " ", "a"]


def test_bytes_that_are_no_text_do_not_wait_for_more() -> None:
    """A made-up index may hold any tokens: what is decoded at a time stays short."""
    tokenizer = tiny_tokenizer()
    lone = tokenizer.convert_tokens_to_ids("\u00fe")
    assert "".join(token_texts(tokenizer, [lone] * 100)) == "\ufffd" * 100


def test_the_embedded_models_texts_join(embedded: LoadedModel) -> None:
    text = DOCUMENT[:20_000] + TEXT
    assert "".join(token_texts(embedded.tokenizer, _ids(embedded.tokenizer, text))) == text


@settings(max_examples=40)
@given(texts=st.lists(st.text(alphabet='aB .!\n\u3002"', max_size=4), max_size=200))
def test_passages_hold_every_token_once_in_order_and_are_short(texts: list[str]) -> None:
    passages = split_passages(texts)
    starts, tokens = zip(*passages, strict=True) if texts else ((), ())
    assert [text for passage in tokens for text in passage] == texts
    assert [len(passage) for passage in tokens] == list(passages.of_tokens().bincount()) if texts else True
    assert all(0 < len(passage) <= LONGEST for passage in tokens)
    assert all(passages.of_tokens()[start] == number for number, start in enumerate(starts))


def test_a_long_sentence_is_cut_between_words() -> None:
    """Words of three tokens each, of which 64 are no multiple."""
    texts = [part for word in range(100) for part in (f" w{word}", "or", "d")]
    found = ["".join(tokens) for _, tokens in split_passages(texts)]
    assert len(found) == 5
    assert all(one.startswith(" w") and one.endswith("ord") for one in found)
    assert [len(tokens) for _, tokens in split_passages(["\u597d"] * 100)] == [LONGEST, 100 - LONGEST]


@any_tokenizer
@pytest.mark.parametrize(
    "text", ["One. \U0001f511 Two.\n\uac00 Three.", "\uac00" * LONGEST, " ".join(["\u3042" * 30] * 9)]
)
def test_the_tokens_of_a_character_stay_together(make: object, text: str) -> None:
    assert callable(make)
    tokenizer = make()
    texts = token_texts(tokenizer, _ids(tokenizer, text))
    passages = list(split_passages(texts))
    assert len(passages) > 1
    assert all(tokens[-1] for _, tokens in passages)


def test_passages_are_sentences() -> None:
    sentences = [
        'He said: "Stop!"',
        " Then nothing.",
        " A price of 3.14\neuros.",
        "\n\n",
        "Two:\n",
        "- one",
        "\u4f60\u597d\u3002",
        "\u597d",
    ]
    joined = "".join(sentences)
    found = ["".join(tokens) for _, tokens in split_passages(list(joined))]
    # White space goes with the sentence before it.
    assert found == [
        'He said: "Stop!" ',
        "Then nothing. ",
        "A price of 3.14\neuros.\n\n",
        "Two:\n",
        "- one\u4f60\u597d\u3002",
        "\u597d",
    ]


def test_a_full_stop_after_white_space_ends_no_sentence() -> None:
    found = ["".join(tokens) for _, tokens in split_passages(list("Why ?\n.. note:: It is so...\nFrom . import a."))]
    assert found == ["Why ?\n", ".. note:: It is so...\n", "From . import a."]
