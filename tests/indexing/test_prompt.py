"""From a document to token ids: what is read, what is refused and why, and the chat frame around it."""

import io
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import START, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.indexing.document import read_document
from sparsekv.indexing.prompt import chat_frame, encode_prompt

TWICE = "{% for message in messages %}{{ message['content'] }}{{ message['content'] }}{% endfor %}"
UPPER = "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.mark.parametrize("text", ["plain", "two\nlines\n", "naïve café 漢字 🙂"])
def test_a_file_and_standard_input_read_alike(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "document.txt"
    path.write_bytes(text.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert read_document(str(path)) == read_document("-") == text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"\xff\xfe\x00a", "not text in UTF-8"),
        (b"caf\xe9", "not text in UTF-8"),
        (b"PK\0\0", "zero bytes"),
    ],
)
def test_a_document_without_text_is_refused_with_its_name(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "document.txt"
    path.write_bytes(data)
    with pytest.raises(SparsekvError, match=reason) as refusal:
        read_document(str(path))
    assert str(path) in str(refusal.value)
    assert refusal.value.exit_code == 1


def test_a_missing_file_and_a_folder_are_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_document(str(tmp_path / "nothing.txt"))
    with pytest.raises(UsageError, match="is a folder"):
        read_document(str(tmp_path))


def test_frame_is_what_the_template_puts_around_a_message(tokenizer: PreTrainedTokenizerFast) -> None:
    frame = chat_frame(tokenizer)
    assert frame is not None
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"DOCUMENT{frame.between}QUESTION"}], tokenize=False, add_generation_prompt=True
    )
    assert f"{frame.before}DOCUMENT{frame.between}QUESTION{frame.after}" == rendered


@pytest.mark.parametrize("template", [TWICE, UPPER, "fixed"], ids=["twice", "changed", "left out"])
def test_a_template_that_does_not_carry_the_text_through_once_is_refused(template: str) -> None:
    with pytest.raises(UsageError, match="--raw"):
        chat_frame(tiny_tokenizer(template))


def test_without_a_template_there_is_no_frame() -> None:
    assert chat_frame(tiny_tokenizer(None)) is None
    assert encode_prompt(tiny_tokenizer(None), "text").chat is None


@settings(max_examples=30, deadline=None)
@given(
    text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), raw=st.booleans(), length=st.integers(1, 60)
)
def test_ids_are_the_frames_head_and_the_first_tokens_of_the_document(text: str, raw: bool, length: int) -> None:
    tokenizer = tiny_tokenizer()
    prompt = encode_prompt(tokenizer, text, raw=raw, max_tokens=length)
    head = "" if prompt.chat is None else prompt.chat.before
    document = tokenizer(text, add_special_tokens=False).input_ids[:length]
    assert prompt.input_ids.tolist() == tokenizer(head, add_special_tokens=False).input_ids + document
    assert (prompt.chat is None) == raw
    assert prompt.text_sha256 == hash_bytes(text.encode())


def test_the_frame_and_the_document_are_tokens_of_the_whole_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = encode_prompt(tokenizer, "The document.")
    assert prompt.chat is not None
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "The document.\n\nWhy?"}], return_dict=False)
    assert whole[: len(prompt.input_ids)] == prompt.input_ids.tolist()
    assert prompt.input_ids[0] == START
