"""Rows that are written while a prefill runs: the same file as of all rows at once."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from sparsekv.formats.int8_rows import quantise
from sparsekv.formats.schema import layer_file
from sparsekv.formats.writer import ArtifactWriter
from sparsekv.indexing import early_rows
from sparsekv.indexing.early_rows import EarlyRows

NAME = layer_file("context", 0)


def _written(folder: Path, rows: tuple[torch.Tensor, torch.Tensor], ends: list[int], *, in_8_bits: bool) -> bytes:
    """The file's bytes, where the prefill's chunks ended there; nothing after an end is known before it."""
    keys, values = rows
    there = torch.full_like(keys, torch.nan), torch.full_like(values, torch.nan)
    stored = quantise(*rows) if in_8_bits else {"keys": keys, "values": values}
    with ArtifactWriter(folder) as writer:
        early = EarlyRows(writer, "recipe", {NAME}, in_8_bits=in_8_bits)
        for end in ends:
            for known, whole in zip(there, rows, strict=True):
                known[:, :end] = whole[:, :end]
            early.write(0, *there, end)
        writer.write(NAME, stored, "recipe")
        writer.record(NAME)
    return (folder / NAME).read_bytes()


@settings(deadline=None, max_examples=30)
@given(
    ends=st.lists(st.integers(1, 300), min_size=1, max_size=6, unique=True).map(sorted),
    heads=st.integers(1, 3),
    least=st.sampled_from([1, 2000, 10**6]),
    in_8_bits=st.booleans(),
)
def test_the_file_is_that_of_all_rows_at_once(
    tmp_path_factory: pytest.TempPathFactory, ends: list[int], heads: int, least: int, in_8_bits: bool
) -> None:
    folder = tmp_path_factory.mktemp("early")
    rows = torch.randn(heads, ends[-1], 8, dtype=torch.bfloat16), torch.randn(heads, ends[-1], 8, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(early_rows, "LEAST_BYTES", least)
        early = _written(folder / "early.skv", rows, ends, in_8_bits=in_8_bits)
    assert early == _written(folder / "at_once.skv", rows, [], in_8_bits=in_8_bits)


def test_files_that_are_not_missing_are_left_alone(tmp_path: Path) -> None:
    rows = torch.randn(1, 64, 8)
    with ArtifactWriter(tmp_path / "some.skv") as writer:
        EarlyRows(writer, "recipe", set(), in_8_bits=False).write(0, rows, rows, 64)
    assert not (tmp_path / "some.skv" / NAME).exists()
    assert not list((tmp_path / "some.skv").rglob("*layer*"))
