"""The page on the index on disk names every tensor, with its dtype and axes, and no other."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.doc_pages import ROOT, tables
from support.small_index import INDEXERS, small_plan, with_changes

from sparsekv.formats.index.reader import Artifact
from sparsekv.indexing.build import build_index

PAGE = ROOT / "docs" / "reference" / "artifact.md"
COLUMNS = ("file", "tensor", "axes", "dtype")
DTYPE = torch.bfloat16  # of the index: no tensor has it for another reason
DOCUMENT = {"N": 306, "M": 286, "R": 16, "Hk": 2, "Hq": 4}
"""Sizes of the plan's prompt and of both models."""
METHODS = INDEXERS | {"csattention": replace(INDEXERS["csattention"], centroids=6)}
"""So many that no two axes of a tensor are as long."""
Tensors = dict[tuple[str, str], torch.Tensor]


def documented() -> dict[tuple[str, str], tuple[list[str], str]]:
    """Axes and dtype by (file or folder, tensor)."""
    return {
        (file, tensor.strip("`")): (axes.strip("[]").split(", "), dtype)
        for files, tensor, axes, dtype, *_ in tables(PAGE, *COLUMNS)
        for file in re.findall(r"`([^`]+)`", files)
    }


def stored(folder: Path) -> Iterator[Tensors]:
    """The tensors of each file of an index, by (file or folder, tensor)."""
    for path in sorted(folder.rglob("*.safetensors")):
        of = path.name if path.parent == folder else f"{path.parent.name}/"
        with safe_open(path, "pt") as file:
            names = file.keys()
            yield {(of, tensor): file.get_tensor(tensor) for tensor in names}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, Tensors]]:
    """Tensors of each file, with a head's channels, of an index with every method and one of a model with learned
    sinks."""
    found: list[tuple[int, Tensors]] = []
    for family, channels, methods in (("qwen3", 32, METHODS), ("gpt-oss", 16, {"squeezed": METHODS["squeezed"]})):
        plan, folder = small_plan(family, methods=methods), tmp_path_factory.mktemp(family) / "doc.skv"
        plan = with_changes(plan, loaded=replace(plan.loaded, model=plan.loaded.model.to(DTYPE)))
        build_index(plan, folder)
        found += ((channels, tensors) for tensors in stored(folder))
    return found


def plain(tensor: str) -> str:
    """A tensor's name as the page writes it."""
    return re.sub(r"^level\d+\.", "levelI.", tensor)


def test_every_tensor_is_documented_and_every_documented_tensor_is_built(files: list[tuple[int, Tensors]]) -> None:
    built = {(file, plain(tensor)) for _, tensors in files for file, tensor in tensors}
    assert built == set(documented())


def test_dtypes_are_those_of_the_page(files: list[tuple[int, Tensors]]) -> None:
    page = documented()
    for _, tensors in files:
        for (file, tensor), data in tensors.items():
            said = page[file, plain(tensor)][1]
            assert data.dtype == (DTYPE if said == "index" else getattr(torch, said)), (file, tensor)


def test_axes_are_those_of_the_page(files: list[tuple[int, Tensors]]) -> None:
    page = documented()
    for channels, tensors in files:
        # What a letter is worth: of the document and the model, given; else the same wherever it stands in a file.
        sizes, quotients = DOCUMENT | {"D": channels}, []
        for (file, tensor), data in tensors.items():
            level = re.match(r"level(\d+)\.", tensor)
            axes = [axis.replace("C_I", f"C_{level[1]}") if level else axis for axis in page[file, plain(tensor)][0]]
            assert len(axes) == data.dim(), (file, tensor)
            for axis, size in zip(axes, data.shape, strict=True):
                if "/" in axis:
                    quotients.append((axis, size, tensor))
                else:
                    letter, _, more = axis.partition(" + ")
                    assert sizes.setdefault(letter, size - int(more or 0)) + int(more or 0) == size, (
                        file,
                        tensor,
                        axis,
                    )
        for axis, size, tensor in quotients:
            whole, parts = axis.split("/")
            assert sizes[whole] == sizes[parts] * size, (tensor, axis)


def test_tensors_in_8_bits_are_those_of_their_page(tmp_path: Path) -> None:
    """Their names, dtypes and axes, and no other tensors."""
    plan = small_plan(kv_dtype="int8")
    build_index(plan, tmp_path / "doc.skv")
    page = ROOT / "docs" / "reference" / "eight-bits.md"
    documented_here = {
        tensor.strip("`"): (axes.strip("[]").split(", "), dtype)
        for tensor, axes, dtype, *_ in tables(page, "tensor", "axes", "dtype")
    }
    artifact = Artifact(tmp_path / "doc.skv")
    clusters = artifact.tensors("squeezed/layer_000.safetensors")
    sizes = DOCUMENT | {"D": 16, "C_0": clusters["level0.counts"].shape[1]}
    of_centroids = {name: tensor for name, tensor in clusters.items() if re.match(r"level0\.\w*centroid", name)}
    stored_here = artifact.tensors("context/layer_000.safetensors") | of_centroids
    assert stored_here.keys() == documented_here.keys()
    for name, (axes, dtype) in documented_here.items():
        assert list(stored_here[name].shape) == [sizes[axis] for axis in axes], name
        assert stored_here[name].dtype == getattr(torch, dtype), name
