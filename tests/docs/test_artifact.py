"""The page on the index on disk names every tensor, with its dtype and axes, and no other."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.doc_pages import ROOT, tables
from support.small_index import INDEXERS, small_plan

from sparsekv.indexing.build import build_index

PAGE = ROOT / "docs" / "reference" / "artifact.md"
COLUMNS = ("file", "tensor", "axes", "dtype")
DTYPE = torch.bfloat16  # of the index: no tensor has it for another reason
Tensors = dict[tuple[str, str], torch.Tensor]


def documented() -> dict[tuple[str, str], tuple[list[str], str]]:
    """Axes and dtype by (file or folder, tensor)."""
    return {
        (file, tensor.strip("`")): (axes.strip("[]").split(", "), dtype)
        for files, tensor, axes, dtype, *_ in tables(PAGE, *COLUMNS)
        for file in re.findall(r"`([^`]+)`", files)
    }


def stored(folder: Path) -> Iterator[Tensors]:
    """The tensors of each file of an index, levels by their letter's name: `level0.counts`."""
    for path in sorted(folder.rglob("*.safetensors")):
        of = path.name if path.parent == folder else f"{path.parent.name}/"
        with safe_open(path, "pt") as file:
            yield {(of, tensor): file.get_tensor(tensor) for tensor in file.keys()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Tensors]:
    """Of an index with every method, and of one of a model with learned sinks. D is no other number there is."""
    found: list[Tensors] = []
    for family, methods in (("qwen3", INDEXERS), ("gpt-oss", {"squeezed": INDEXERS["squeezed"]})):
        plan, folder = small_plan(family, methods=methods), tmp_path_factory.mktemp(family) / "doc.skv"
        plan = replace(plan, loaded=replace(plan.loaded, model=plan.loaded.model.to(DTYPE)))
        build_index(plan, folder)
        found += stored(folder)
    return found


def plain(tensor: str) -> str:
    """A tensor's name as the page writes it."""
    return re.sub(r"^level\d+\.", "levelI.", tensor)


def test_every_tensor_is_documented_and_every_documented_tensor_is_built(files: list[Tensors]) -> None:
    built = {(file, plain(tensor)) for tensors in files for file, tensor in tensors}
    assert built == set(documented())


def test_dtypes_are_those_of_the_page(files: list[Tensors]) -> None:
    page = documented()
    for tensors in files:
        for (file, tensor), data in tensors.items():
            said = page[file, plain(tensor)][1]
            assert data.dtype == (DTYPE if said == "index" else getattr(torch, said)), (file, tensor)


def test_axes_are_those_of_the_page(files: list[Tensors]) -> None:
    page = documented()
    document = {"N": 306, "M": 286, "R": 16, "Hk": 2, "Hq": 4}
    for tensors in files:
        # What a letter is worth: of the document's, given; of a method's, the same wherever it stands in a file.
        sizes = dict(document)
        for (file, tensor), data in sorted(tensors.items(), key=lambda one: "/" in "".join(page[one[0][0], plain(one[0][1])][0])):
            level = re.match(r"level(\d+)\.", tensor)
            axes = [axis.replace("C_I", f"C_{level[1]}") if level else axis for axis in page[file, plain(tensor)][0]]
            assert len(axes) == data.dim(), (file, tensor)
            for axis, size in zip(axes, data.shape, strict=True):
                assert size == value(axis, size, sizes), (file, tensor, axis)


def value(axis: str, size: int, sizes: dict[str, int]) -> int:
    """What an axis is as long as; a letter that was not seen before is what makes it so."""
    name, sign, other = re.fullmatch(r"(\w+)(?:( \+ |/)(\w+))?", axis).groups()  # type: ignore[union-attr]
    if sign is None:
        return sizes.setdefault(name, size)
    if sign == "/":
        return size if name not in sizes else sizes[name] // sizes[other]
    return sizes.setdefault(name, size - int(other)) + int(other)
