"""Tests of reading an index early: it reads the data that opening would read, and opening raises its errors."""

import concurrent.futures.thread
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from support.configs import sparse
from support.sealing import Tensors, change_tensors
from support.small_index import build_small, small_plan
from support.tiny_models import save_tiny

from sparsekv.formats.errors import ArtifactError, IdentityError, SparsekvError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import layer_file
from sparsekv.formats.models.load import identify, load_model
from sparsekv.indexing.methods.codes import CodesIndexer
from sparsekv.indexing.methods.multipole import WindowedMultipoleIndexer
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.attention.config import Dense
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding import early as early_reading
from sparsekv.runtime.decoding import prepare
from sparsekv.runtime.decoding.early import EarlyReading
from sparsekv.runtime.decoding.load import load_and_open
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.decoding.prepare import files_read
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, MethodSpec, methods

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Stored:
    """A tiny model in a folder, and an index that names it."""

    model: str
    index: Path

    @property
    def artifact(self) -> Artifact:
        return Artifact(self.index)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = tmp_path_factory.mktemp("early")
    model = str(save_tiny(folder / "model"))
    loaded = load_model(model, device="cpu")
    index = build_small(folder / "small.skv", loaded=loaded, prompt=small_plan().prompt)
    return Stored(model, index.artifact.folder)


@pytest.fixture
def stored(built: Stored, tmp_path: Path) -> Stored:
    """With a copy of the index, which a test may change."""
    return replace(built, index=Path(shutil.copytree(built.index, tmp_path / "small.skv")))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_and_weights_are_those_that_are_stored(stored: Stored, device: str) -> None:
    artifact = stored.artifact
    early = EarlyReading(artifact, device, files_read(artifact, MethodSpec("squeezed", "", Squeezed())), hold=True)
    opened = load_and_open(artifact, stored.model, device, hold=True, early=early)
    plain = load_and_open(stored.artifact, stored.model, device)
    for layer in artifact.manifest.indexed_layers:
        ours, theirs = opened.take_rows(layer).on(opened.device), plain.take_rows(layer).on(plain.device)
        assert all(torch.equal(*both) for both in zip(ours, theirs, strict=True))
    for weight, other in zip(opened.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(weight, other)


@pytest.mark.parametrize("device", DEVICES)
def test_what_cannot_be_read_is_told_by_opening(stored: Stored, device: str) -> None:
    artifact = stored.artifact
    (stored.index / artifact.manifest.files[layer_file("context", 0)].path).write_bytes(b"cut")
    early = EarlyReading(artifact, device, hold=True)
    with pytest.raises(ArtifactError):
        load_and_open(artifact, stored.model, device, hold=True, early=early)


@pytest.mark.parametrize("device", DEVICES)
def test_other_weights_are_told_before_an_answer(stored: Stored, device: str) -> None:
    loaded = load_model(stored.model, device=device)
    known = identify(loaded)
    weight = loaded.model.get_input_embeddings().weight
    weight.data = -weight.data
    with pytest.raises(IdentityError, match="the probe"):
        open_index(stored.artifact, loaded.model, loaded.tokenizer, known, hold=True)


@pytest.mark.parametrize(("model", "device"), [("no/such-model", "cpu"), ("no/such-model", "cuda:99"), ("", "toaster")])
def test_a_wrong_model_or_device_is_told_by_opening(stored: Stored, model: str, device: str) -> None:
    early = EarlyReading(stored.artifact, device, hold=True)
    with pytest.raises(SparsekvError):
        load_and_open(stored.artifact, model, device, early=early)


def test_sums_are_checked_once(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = stored.artifact
    files = files_read(artifact, MethodSpec("squeezed", "", Squeezed()))
    assert files_read(artifact, MethodSpec("quest", "", Quest())) == [one for one in files if one.startswith("queries")]
    assert files_read(artifact, Dense()) == []
    EarlyReading(artifact, "cpu", files)
    _wait_for_reading()
    monkeypatch.setattr(artifact, "_check_sum", pytest.fail)
    artifact.check_sums(files)


def _wait_for_reading() -> None:
    for thread in threading.enumerate():
        if thread.name == "early-reading":
            thread.join()


def _early(stored: Stored) -> EarlyReading:
    """Return the early reading of an index that squeezed will answer from, once all of it is read."""
    artifact = stored.artifact
    files, form = files_read(artifact, MethodSpec("squeezed", "", Squeezed())), MethodSpec("squeezed", "", Squeezed())
    early = EarlyReading(artifact, "cpu", files, hold=True, form=form)
    _wait_for_reading()
    return early


def test_a_method_is_prepared_once(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, early = torch.get_num_threads(), _early(stored)
    assert torch.get_num_threads() == threads
    with monkeypatch.context() as forbidden:
        forbidden.setattr(prepare, "prepare_layer", pytest.fail)
        opened = load_and_open(stored.artifact, stored.model, "cpu", hold=True, early=early)
        cache = opened.cache(sparse("squeezed", Squeezed(), Budget(0.1)))
    late = load_and_open(stored.artifact, stored.model, "cpu").cache(sparse("squeezed", Squeezed(), Budget(0.1)))
    assert torch.equal(_logits(opened, cache), _logits(opened, late))


@pytest.mark.parametrize(("method", "residual"), [(Squeezed(opened=3.0), False), (Squeezed(), True)])
def test_only_the_method_that_was_prepared_is_taken_and_once(stored: Stored, method: Squeezed, residual: bool) -> None:
    """A cache with other parameters is made of its own, and one made later of none that another has."""
    opened = load_and_open(stored.artifact, stored.model, "cpu", hold=True, early=_early(stored))
    assert opened.prepared is not None
    other = opened.cache(sparse("squeezed", method, Budget(0.1), residual=residual))
    assert opened.prepared is None
    plain = load_and_open(stored.artifact, stored.model, "cpu")
    theirs = plain.cache(sparse("squeezed", method, Budget(0.1), residual=residual))
    assert torch.equal(_logits(opened, other), _logits(plain, theirs))
    again, plainly = (one.cache(sparse("squeezed", Squeezed(), Budget(0.1))) for one in (opened, plain))
    assert torch.equal(_logits(opened, again), _logits(plain, plainly))


@pytest.mark.parametrize("loading", [False, True])
def test_nothing_is_prepared_while_the_model_is_loaded(
    loading: bool, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's default dtype, which a method may take for its numbers, is the model's then."""
    begun: list[Iterator[None]] = []
    monkeypatch.setattr(early_reading, "run_beside", lambda steps, name: begun.append(steps))
    early = EarlyReading(stored.artifact, "cpu", hold=True, form=MethodSpec("squeezed", "", Squeezed()))
    if loading:
        early.begin_loading()
    for steps in begun:  # here, not beside: the thread may be done before the loading begins
        assert all(step is None for step in steps)
    assert (early.prepared is None) == loading
    opened = load_and_open(stored.artifact, stored.model, "cpu", hold=True, early=early)
    opened.cache(sparse("squeezed", Squeezed(), Budget(0.1)))


@pytest.mark.parametrize("name", ["codes", "multipole-windowed"])
def test_a_method_is_the_same_whatever_torchs_default_dtype_is(name: str, tmp_path: Path) -> None:
    methods_built = {
        "codes": CodesIndexer(levels=(0.1,), iterations=2, code_bytes=4, query_sample=64),
        "multipole-windowed": WindowedMultipoleIndexer(levels=(0.1,), iterations=2),
    }
    index = build_small(tmp_path / "small.skv", methods=methods_built)
    prepared = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            selector = prepare.prepare_layer(
                LayerRows(index.artifact, 0), MethodSpec(name, "", methods()[name]())
            ).selector
        finally:
            torch.set_default_dtype(torch.float32)
        prepared.append(selector)
    one, other = (_numbers(selector) for selector in prepared)
    assert one.keys() == other.keys()
    assert one
    for key, number in one.items():
        assert number.dtype == other[key].dtype, key
        assert torch.equal(number, other[key]), key


def _numbers(thing: object, depth: int = 2) -> dict[str, torch.Tensor]:
    """The tensors that an object, and what it has, holds."""
    found = {}
    for key, value in getattr(thing, "__dict__", {}).items():
        if isinstance(value, torch.Tensor):
            found[key] = value
        elif depth:
            found |= {f"{key}.{inner}": tensor for inner, tensor in _numbers(value, depth - 1).items()}
    return found


@torch.inference_mode()
def _logits(opened: OpenIndex, cache: IndexCache) -> torch.Tensor:
    """Return the logits of a question's two tokens."""
    with route_attention(opened.model, cache.attend):
        return opened.model(torch.tensor([[5, 7]]), past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize("name", ["token_order", "level0.centroids"])
def test_a_bad_tensor_that_was_met_early_is_refused_in_the_same_words(stored: Stored, name: str) -> None:
    def spoil(tensors: Tensors) -> Tensors:
        tensors[name][0, 0] = 10**6 if name == "token_order" else torch.nan
        return tensors

    change_tensors(stored.index, layer_file("squeezed", 1), spoil)
    refusals = []
    for early in (None, _early(stored)):
        opened = load_and_open(stored.artifact, stored.model, "cpu", hold=True, early=early)
        with pytest.raises(ArtifactError, match=f"{name} in layer 1 of squeezed .* no build writes") as refusal:
            opened.cache(sparse("squeezed", Squeezed(), Budget(0.1)))
        refusals.append(str(refusal.value))
    assert refusals[0] == refusals[1]


def test_a_program_that_ends_meanwhile_says_nothing_of_it(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python starts no thread of a pool any more once it ends; here that is so before the reading begins."""
    monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest's prints nothing
    artifact = stored.artifact
    EarlyReading(artifact, "cpu", [*artifact.manifest.files], hold=True)
    _wait_for_reading()
    assert capfd.readouterr().err == ""
