"""Which changes of a model's folder change the hash of its tokenizer's files, and which do not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sparsekv.formats.models import load
from sparsekv.formats.models.load import TokenizerFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "tokenizer.json").write_text("{ }"),
        lambda folder: (folder / "vocab.txt").write_text("a"),
        lambda folder: (folder / "tokenizer_config.json").unlink(),
        lambda folder: (folder / "tokenizer_config.json").rename(folder / "added_tokens.json"),
        lambda folder: (folder / "additional_chat_templates" / "tools.jinja").write_text(""),
    ],
    ids=["changed", "added", "removed", "renamed", "another template"],
)
def test_every_file_of_a_tokenizer_counts(folder: Path, change: Callable[[Path], object]) -> None:
    before = TokenizerFiles(folder).hash()
    change(folder)
    assert TokenizerFiles(folder).hash() not in (None, before)


def test_other_files_and_the_place_do_not_count(folder: Path) -> None:
    before = TokenizerFiles(folder).hash()
    (folder / "model.safetensors").write_bytes(b"others")
    (folder / "sha256.json").write_text("{}")
    (folder / "README.md").write_text("words")
    assert TokenizerFiles(folder).hash() == before
    assert TokenizerFiles(folder.rename(folder.parent / "moved")).hash() == before


@pytest.mark.parametrize("library", ["transformers", "tokenizers"])
def test_the_versions_of_who_reads_them_count(folder: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = TokenizerFiles(folder).hash()
    monkeypatch.setattr(f"{library}.__version__", "0.0")
    assert TokenizerFiles(folder).hash() != before


def test_there_is_none_of_files_that_are_large_or_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TokenizerFiles(folder / "nowhere").hash() is None
    monkeypatch.setattr(load, "MOST_TOKENIZER_BYTES", 1)
    assert TokenizerFiles(folder).hash() is None


def test_there_is_none_of_files_that_change_while_the_tokenizer_is_loaded(folder: Path) -> None:
    before = TokenizerFiles(folder)
    (folder / "tokenizer.json").write_text("{ }")
    assert before.hash() is None
    assert TokenizerFiles(folder).hash() is not None
