"""Reading a document: no further than it is needed, and refused wherever it is no text."""

import codecs
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.peak import PEAK

from sparsekv.formats.checksums import hash_bytes, hash_file
from sparsekv.formats.documents.document import decode_text, open_document, read_document
from sparsekv.formats.errors import SparsekvError, UsageError

LONG = "naïve café 漢字 🙂, and so on\n" * 100_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "document.txt"


@pytest.mark.parametrize("text", ["plain", "two\nlines\n", "naïve café 漢字 🙂", LONG])
def test_a_file_and_standard_input_read_alike(text: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(text.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert read_document(str(path)) == read_document("-") == text


@pytest.mark.parametrize("characters", [1, 1000, 10**6, 10**9])
def test_a_beginning_is_read_and_the_rest_only_counts(characters: int, path: Path) -> None:
    path.write_text(LONG, encoding="utf-8")
    with open_document(str(path), whole=False) as document:
        assert document.first(characters) == LONG[:characters]
        assert document.sha256() == hash_bytes(LONG.encode())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b" " * 3_000_000, "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\xff\xfe\x00\xd8", "not text in UTF-16"),
        (b"caf\xe9", "not text in UTF-8"),
        (b"a" * 3_000_000 + b"\xc3", "not text in UTF-8"),
        (b"PK\0\0", "zero bytes"),
        (b"a" * 3_000_000 + b"\0", "zero bytes"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_document_without_text_is_refused_with_its_name(data: bytes, reason: str, whole: bool, path: Path) -> None:
    path.write_bytes(data)

    def read() -> None:
        with open_document(str(path), whole=whole) as document:
            document.first(10)
            document.sha256()

    with pytest.raises(SparsekvError, match=reason) as refusal:
        read()
    assert str(path) in str(refusal.value)
    assert refusal.value.exit_code == 2


def test_a_missing_file_and_a_folder_are_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_document(str(tmp_path / "nothing.txt"))
    with pytest.raises(UsageError, match="is a folder"):
        read_document(str(tmp_path))
    with pytest.raises(SparsekvError, match="name too long"):
        read_document(str(tmp_path / ("a" * 300)))


def test_a_byte_order_mark_is_no_part_of_the_text(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbfA text \xef\xbb\xbf with marks")
    assert read_document(str(path)) == "A text \ufeff with marks"
    with open_document(str(path), whole=False) as document:
        assert document.sha256() == hash_bytes("A text \ufeff with marks".encode())


READ = f"""{PEAK}
import sys
from sparsekv.formats.documents.document import open_document
from sparsekv.formats.models.load import load_tokenizer
from sparsekv.formats.documents.prompt import encode_prompt
tokenizer = load_tokenizer("smollm2-135m-instruct")
with open_document(sys.argv[1], whole=False) as document:
    prompt = encode_prompt(tokenizer, document, max_tokens=300)
print(len(prompt.input_ids), prompt.cut, prompt.text_sha256, peak())
"""


@pytest.mark.slow
@pytest.mark.parametrize("source", ["file", "pipe"])
def test_the_first_tokens_of_a_gigabyte_take_less_memory_than_one(
    source: str, path: Path, embedded_folder: Path
) -> None:
    line = b"A line of text that has no end of lines after it.\n"
    with path.open("wb") as file:
        for _ in range(1000):
            file.write(line * 20_000)
    assert path.stat().st_size == 10**9
    with path.open("rb") as stdin:
        command = [sys.executable, "-c", READ, "-" if source == "pipe" else str(path)]
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=True, env=os.environ)
    tokens, cut, text_sha256, held = done.stdout.split()
    assert (int(tokens) > 300, cut, text_sha256) == (True, "300", hash_file(path))
    assert int(held) < 10**9


ENCODINGS = ["utf-8", "utf-8-sig", "UTF-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252", "ascii"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("whole", [True, False])
def test_a_text_in_any_encoding_is_the_same_text(encoding: str, whole: bool, path: Path) -> None:
    """Read in pieces that end within a character; with the sum of the text in UTF-8, so that an index stays its own."""
    text = "naïve café, and so on\n" * 60_000
    text = text.encode("ascii", "ignore").decode() if encoding == "ascii" else text
    path.write_bytes(text.encode(encoding))
    with open_document(str(path), whole=whole, encoding=encoding) as document:
        assert document.first(10_000) == text[:10_000]
        assert document.sha256() == hash_bytes(text.encode())


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_mark_before_a_text_of_a_named_order_is_no_part_of_it(encoding: str, path: Path) -> None:
    path.write_bytes("\ufeffA text.".encode(encoding))
    assert read_document(str(path), encoding) == read_document(str(path), "utf-16") == "A text."


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("named", ["utf-8", "utf-8-sig"])
def test_a_byte_order_mark_names_the_encoding_by_itself(encoding: str, named: str, path: Path) -> None:
    text = "naïve café, and so on\n" * 60_000
    mark = "" if encoding == "utf-8-sig" else "\ufeff"
    path.write_bytes((mark + text).encode(encoding))
    assert read_document(str(path), named) == text
    assert decode_text(path.read_bytes(), str(path)) == text


@pytest.mark.parametrize(
    ("data", "encoding", "says"),
    [
        ("é".encode("latin-1"), "utf-8", "such as --encoding latin-1, or convert it"),
        ("caf\u00e9".encode("latin-1"), "utf-8", "not text in UTF-8 at byte offset 3;"),
        ("é".encode() * 2**20 + b"\xff", "utf-8", "at byte offset 2,097,152;"),
        (b"a" + "é".encode() * 2**20 + b"\xc3", "utf-8", "at byte offset 2,097,153;"),
        (codecs.BOM_UTF16_LE + "a".encode("utf-16-le") + b"\x00\xd8", "utf-8", "not text in UTF-16 at byte offset 4"),
        ("A text.".encode("utf-16-le"), "utf-8", "zero bytes, as UTF-16 does; give --encoding utf-16-le$"),
        ("A text.".encode("utf-16-be"), "latin-1", "zero bytes, as UTF-16 does; give --encoding utf-16-be$"),
        ("A text.".encode("utf-16-be"), "utf-16", "no byte order mark; give --encoding utf-16-le, or utf-16-be$"),
        (b"a" * 11, "utf-16-le", "not text in UTF-16-LE"),
        (b"\x81", "cp1252", "not text in CP1252"),
    ],
)
def test_a_text_in_another_encoding_says_which(data: bytes, encoding: str, says: str, path: Path) -> None:
    path.write_bytes(data)
    with pytest.raises(UsageError, match=says) as refusal:
        read_document(str(path), encoding)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("name", ["", "utf-99", "base64", "rot13", "hex", "a\0b", "é", "undefined"])
def test_what_is_no_encoding_of_text_is_refused_by_its_name(name: str, path: Path) -> None:
    path.write_text("A text.")
    with pytest.raises(UsageError, match="there is no such text encoding"):
        read_document(str(path), name)
