"""An indexer of another package that builds wrong tensors ends the build in a line, and the index stays as it was."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from support.small_index import small_plan, with_changes

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.index.reader import Artifact
from sparsekv.indexing.build import build_index
from sparsekv.indexing.indexers.interface import Indexer, LayerInput, Tensors

Fault = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class FaultyIndexer(Indexer):
    """Orders tokens by the norm of their key, changed by a fault of the test."""

    fault: ClassVar[Fault]

    def build_layer(self, layer: LayerInput) -> Tensors:
        order = layer.keys.norm(dim=-1).argsort(dim=-1) + layer.split.sinks
        return type(self).fault(order.int())  # type: ignore[return-value]  # a fault may be this, too


def _beside(tensor: object) -> Fault:
    return lambda order: {"token_order": order, "odd": tensor}


FAULTS: dict[str, tuple[Fault, str]] = {
    "None": (lambda order: None, "layer 0 of odd is None, not a dict of tensors"),
    "no tensors": (lambda order: {}, "layer 0 of odd is {}, not a dict of tensors"),
    "floats": (lambda order: {"token_order": order.float()}, "token_order of layer 0 of odd is float32 [2, "),
    "too short": (
        lambda order: {"token_order": order[:, :-3]},
        "which does not fit int32 [Hk, M] with Hk = 2, M = 286;",
    ),
    "a token twice": (
        lambda order: {"token_order": order.clamp(max=9)},
        "token_order in layer 0 of odd holds numbers that no build writes",
    ),
    "a number as name": (lambda order: {5: order}, "a tensor named 5, which is not a string"),
    "a list": (lambda order: {"token_order": order.tolist()}, "token_order of layer 0 of odd is of the type list"),
    "numpy": (lambda order: {"token_order": order.numpy()}, "token_order of layer 0 of odd is of the type ndarray"),
    "complex": (_beside(torch.zeros(3, dtype=torch.complex64)), "odd of layer 0 of odd is complex64"),
    "sparse": (_beside(torch.eye(3).to_sparse()), "odd of layer 0 of odd is float32 in the layout sparse_coo"),
    "NaN": (_beside(torch.full((2,), float("nan"))), "odd in layer 0 of odd holds numbers that no build writes"),
    "many axes": (_beside(torch.zeros([1] * 9)), "odd of layer 0 of odd has 9 axes; an index stores at most 8"),
}


def _raise(order: torch.Tensor) -> object:
    raise ValueError("of my own\nin two lines")


def _exit(order: torch.Tensor) -> object:
    raise SystemExit(7)


ERRORS: dict[str, tuple[Fault, str]] = {
    "an error": (_raise, " failed: ValueError: of my own in two lines (test_faulty_indexer.py, line "),
    "an exit": (_exit, " failed: SystemExit: 7 (test_faulty_indexer.py, line "),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index whose builds below must not change it."""
    folder = tmp_path_factory.mktemp("faulty") / "a.skv"
    build_index(small_plan(), folder)
    return folder


@pytest.mark.parametrize("name", FAULTS | ERRORS)
def test_wrong_tensors_are_refused_and_the_index_stays_as_it_was(
    name: str, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, says = (FAULTS | ERRORS)[name]
    monkeypatch.setattr(FaultyIndexer, "fault", staticmethod(fault), raising=False)
    before = Artifact(built).manifest
    with pytest.raises(SparsekvError) as refused:
        build_index(with_changes(small_plan(), methods={"odd": FaultyIndexer()}), built)
    assert says in str(refused.value)
    assert str(refused.value).startswith(f"the method FaultyIndexer of the package {__name__.partition('.')[0]}")
    artifact = Artifact(built)
    assert artifact.manifest == before
    assert len(list(artifact.verify())) == len(before.files)


def test_an_indexer_is_built_once_its_fault_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, folder = with_changes(small_plan(), methods={"odd": FaultyIndexer()}), tmp_path / "b.skv"
    monkeypatch.setattr(FaultyIndexer, "fault", staticmethod(FAULTS["floats"][0]), raising=False)
    with pytest.raises(SparsekvError, match="is float32"):
        build_index(plan, folder)
    monkeypatch.setattr(FaultyIndexer, "fault", staticmethod(_beside(torch.ones(3))))
    build_index(plan, folder)
    assert list(Artifact(folder).manifest.methods) == ["odd"]


def test_an_error_of_a_calibration_names_the_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultyIndexer, "fault", staticmethod(_beside(torch.ones(3))), raising=False)
    monkeypatch.setattr(FaultyIndexer, "calibrate", lambda self, layers: next(layers()).tensors["none"])
    with pytest.raises(SparsekvError, match=r"FaultyIndexer of .* failed: KeyError: 'none' \(test_faulty_indexer.py,"):
        build_index(with_changes(small_plan(), methods={"odd": FaultyIndexer()}), tmp_path / "c.skv")
