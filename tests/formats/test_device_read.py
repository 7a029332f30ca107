"""Files read to a GPU hold what their mappings hold, whatever their tensors' sizes and dtypes."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparsekv.formats.device import PIECE, device_reader
from sparsekv.formats.index.reader import map_tensors

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Tensors that end in the middle of a piece, at its end, are empty, are one number, of all widths."""
    found = {
        "floats": torch.randn(3, 1_700_003),
        "halves": torch.randn(PIECE // 2).bfloat16(),
        "longs": torch.randint(-(2**62), 2**62, (2, PIECE // 8)),
        "bytes": torch.randint(0, 256, (PIECE + 1,), dtype=torch.uint8),
        "flags": torch.rand(77) > 0.5,
        "empty": torch.zeros(4, 0, 8),
        "number": torch.tensor(3.25, dtype=torch.float64),
    }
    save_file(found, tmp_path / "some.safetensors")
    return tmp_path / "some.safetensors"


def test_what_is_read_is_what_is_mapped(stored: Path) -> None:
    descriptor = os.open(stored, os.O_RDONLY)
    mapped = map_tensors(descriptor, "some")
    with ThreadPoolExecutor(3) as threads:
        for read in threads.map(lambda turn: device_reader(GPU).read(descriptor, mapped, {}), range(6)):
            torch.cuda.synchronize()
            assert read.keys() == mapped.keys()
            for name, tensor in read.items():
                assert tensor.device == GPU
                assert tensor.dtype == mapped[name].dtype
                assert torch.equal(tensor.cpu(), mapped[name]), name
    os.close(descriptor)


def test_rows_in_the_middle_of_a_tensor_are_read_from_where_they_lie(stored: Path) -> None:
    descriptor = os.open(stored, os.O_RDONLY)
    mapped = map_tensors(descriptor, "some")
    rows = {name: mapped[name][1:] for name in ("floats", "longs", "bytes")}
    read = device_reader(GPU).read(descriptor, rows, {name: mapped[name][:1].nbytes for name in rows})
    for name, tensor in read.items():
        assert torch.equal(tensor.cpu(), mapped[name][1:]), name
    os.close(descriptor)


def test_memory_that_is_still_used_is_not_overwritten(stored: Path) -> None:
    descriptor = os.open(stored, os.O_RDONLY)
    mapped = map_tensors(descriptor, "some")
    for _ in range(4):
        earlier = torch.ones(3, 1_700_003, device=GPU)
        torch.cuda._sleep(20_000_000)
        total = earlier.sum()
        del earlier  # its memory is given to the tensor that is read next
        read = device_reader(GPU).read(descriptor, mapped, {})
        assert total.item() == pytest.approx(3 * 1_700_003)
        assert torch.equal(read["floats"].cpu(), mapped["floats"])
    os.close(descriptor)


def test_a_file_that_ends_early_is_refused(stored: Path) -> None:
    descriptor = os.open(stored, os.O_RDONLY)
    mapped = {name: tensor.clone() for name, tensor in map_tensors(descriptor, "some").items()}
    os.truncate(stored, stored.stat().st_size // 2)
    with pytest.raises(OSError, match="shorter than it was"):
        device_reader(GPU).read(descriptor, mapped, {})
    os.close(descriptor)
