"""Memory pages of mapped files: all mapped by one call, released by another, and the file's content stays."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparsekv.formats.device import map_pages, release_pages

ROWS = 4096


def _resident(tensor: torch.Tensor) -> int:
    """Kilobytes of the mapping around a tensor that are mapped."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1])
    raise AssertionError("the tensor is in no mapping")


@pytest.fixture
def mapped(tmp_path: Path) -> torch.Tensor:
    """[4096, 256] float32, 4 MiB, as a view of its file."""
    save_file({"rows": torch.arange(ROWS * 256, dtype=torch.float32).view(ROWS, 256)}, tmp_path / "rows.safetensors")
    return load_file(tmp_path / "rows.safetensors")["rows"]


def test_all_pages_are_mapped_and_released(mapped: torch.Tensor) -> None:
    size, page = mapped.nbytes // 1024, 4
    release_pages(mapped)
    assert _resident(mapped) <= 2 * page
    assert [*map_pages([mapped])] == [None]
    assert _resident(mapped) >= size - 2 * page
    release_pages(mapped)
    assert _resident(mapped) <= 2 * page
    assert torch.equal(mapped.flatten(), torch.arange(ROWS * 256, dtype=torch.float32))


def test_memory_of_no_file_keeps_its_content() -> None:
    tensors = [torch.ones(ROWS), torch.empty(0), torch.full((3, 5), 7.0)]
    assert len([*map_pages(tensors)]) <= len(tensors)
    assert torch.equal(tensors[0], torch.ones(ROWS))
    assert torch.equal(tensors[2], torch.full((3, 5), 7.0))
