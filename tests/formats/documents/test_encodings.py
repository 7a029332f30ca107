"""Encodings that are declared or detected: certain, or none."""

from pathlib import Path

import pytest
from support.odd_documents import GERMAN, RUSSIAN, TEXTS

from sparsekv.formats.documents.document import declared_encoding, detected_encoding, page_encoding, read_document
from sparsekv.formats.errors import UsageError

JAPANESE = "今日は天気がいいので、公園へ散歩に行きます。東京は日本の首都です。"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [(GERMAN, "cp1252"), (RUSSIAN, "cp1251"), (RUSSIAN, "koi8-r"), (JAPANESE, "shift_jis"), (JAPANESE, "euc_jp")],
)
def test_a_long_text_has_a_certain_encoding(text: str, encoding: str) -> None:
    data = text.encode(encoding)
    found = detected_encoding(data)
    assert found is not None
    assert data.decode(found) == text
    assert detected_encoding(bytes(data)) == found


@pytest.mark.parametrize(
    "data",
    [
        b"a price of \xa35",
        TEXTS["random.txt"],
        GERMAN.encode() + b"\xff",
        GERMAN.encode("cp1252") + b"\0",
        GERMAN.encode("utf-16-le"),
        RUSSIAN.encode("cp866"),
        b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    ],
)
def test_what_is_not_certain_has_none(data: bytes) -> None:
    assert detected_encoding(data) is None


@pytest.mark.parametrize(
    ("page", "encoding"),
    [
        (b"<meta charset=windows-1251>", "cp1251"),
        (b"<META http-equiv='Content-Type' content='text/html; charset=ISO-8859-1'>", "cp1252"),
        (b"<?xml version='1.0' encoding='Shift_JIS'?>", "cp932"),
        (b"<meta charset=utf-16>", None),
        (b"<meta charset=punycode>", None),
        (b"<meta charset=rot13>", None),
        (b"<p>charset=cp1251", None),
        (b"<!-- <meta charset=cp1251> --><meta charset=koi8-r>", "koi8-r"),
        (b"<!-- <meta charset=cp1251> -->", None),
        (b"<!-- not ended <meta charset=cp1251>", None),
    ],
)
def test_a_page_declares_its_encoding(page: bytes, encoding: str | None) -> None:
    assert declared_encoding(page) == encoding
    assert page_encoding(page) == encoding or (encoding is None and page_encoding(page) == "utf-8")
    assert page_encoding(page, "latin-1") == "latin-1"
    assert page_encoding(b"\xef\xbb\xbf" + page) == "utf-8"
    assert page_encoding(b"\xff\xfe" + page) == "utf-16"


@pytest.mark.parametrize(
    ("name", "encoding", "text"),
    [
        ("iso-2022-jp", "iso2022_jp", JAPANESE),  # the bytes of the first three are valid UTF-8, too
        ("iso-2022-kr", "iso2022_kr", "안녕하세요"),
        ("hz-gb-2312", "hz", "今天天气"),
        ("iso-8859-11", "cp874", "\u201cไทย\u201d"),
        ("shift_jis", "cp932", "①㈱"),
        ("euc-kr", "cp949", "똠방"),
        ("big5", "big5hkscs", "嘅"),
    ],
)
def test_a_page_is_read_as_it_declares(tmp_path: Path, name: str, encoding: str, text: str) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(f"<meta charset={name}><p>".encode() + text.encode(encoding))
    assert read_document(str(path)) == text


def test_the_refusal_of_a_named_file_names_the_encoding_that_it_seems_to_have(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(GERMAN.encode("cp1252"))
    with pytest.raises(UsageError, match="give the encoding that it seems to have, --encoding cp1252, or convert"):
        read_document(str(path))
    assert read_document(str(path), "cp1252") == GERMAN
