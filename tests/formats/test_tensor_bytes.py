"""The bytes of a file against those that the safetensors library writes."""

import hypothesis.strategies as st
import torch
from hypothesis import given
from safetensors.torch import save

from sparsekv.formats.index.growing_file import STAGING, safetensors_bytes

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16),
)


@st.composite
def some_tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=8, unique=True))
    shapes = st.lists(st.integers(0, 4), max_size=3)
    return {
        name: torch.randint(0, 2, draw(shapes)).to(draw(st.sampled_from(DTYPES))) * draw(st.sampled_from([0, 1]))
        for name in names
    }


@given(some_tensors())
def test_the_bytes_are_those_of_the_library(tensors: dict[str, torch.Tensor]) -> None:
    assert b"".join(safetensors_bytes(tensors)) == save(tensors)


def test_large_views_too() -> None:
    rows = torch.randn(2, STAGING // 4)
    tensors = {"keys": rows.T, "values": rows[:, 1:], "rows": rows}
    assert b"".join(safetensors_bytes(tensors)) == save({name: rows.contiguous() for name, rows in tensors.items()})
