"""Opening an index: only with the model, tokenizer and template it was built with, and every refusal says why."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.configs import sparse
from support.reference import assert_close
from support.sealing import change_tensors
from support.small_index import INDEXERS, build_small, plain_logits, random_ids, reopen, small_plan, stepped_logits
from support.tiny_models import CHAT_TEMPLATE, FAMILIES, tiny_tokenizer

from sparsekv.formats.errors import ArtifactError, IdentityError
from sparsekv.formats.index.identity import SAMPLES_PER_TENSOR
from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.formats.index.schema import layer_file
from sparsekv.formats.models.load import LoadedModel, identify
from sparsekv.indexing.build import build_index
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.indexing.plan import BuildPlan
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.decoding.prepare import prepare_layer, stored_context
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.multipole import Multipole, WindowedMultipole
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec, methods


def _refused(index: OpenIndex, loaded: LoadedModel) -> IdentityError:
    with pytest.raises(IdentityError) as refusal:
        open_index(index.artifact, loaded.model, loaded.tokenizer, identify(loaded))
    message = str(refusal.value)
    assert refusal.value.field in message
    assert "the index was built with" in message
    assert "--model tiny-llama" in message
    assert "build the index again" in message
    return refusal.value


def _loaded(template: str | None = CHAT_TEMPLATE) -> LoadedModel:
    return LoadedModel(FAMILIES["llama"](), tiny_tokenizer(template), "another-name", None)


def test_the_same_model_opens_the_index_under_any_name(index: OpenIndex) -> None:
    loaded = _loaded()
    assert open_index(index.artifact, loaded.model, loaded.tokenizer, identify(loaded)).split == index.split


def test_heads_or_layers_that_are_not_the_models_are_told(index: OpenIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest says what it likes of the model; its files then have other heads, or are fewer."""
    loaded, facts = _loaded(), index.artifact.manifest
    for change, says in (("layers", "2 layers, and the model 3"), ("heads", "2 heads of 8 channels, and the model")):
        other = Artifact(index.artifact.folder)
        if change == "layers":
            monkeypatch.setattr(other, "manifest", facts.model_copy(update={"layers": facts.layers[:2]}))
        else:
            monkeypatch.setattr(other, "heads_and_channels", lambda layer: (2, 8))
        with pytest.raises(ArtifactError, match=says):
            open_index(other, loaded.model, loaded.tokenizer, identify(loaded))


@torch.no_grad()
def test_other_weights_of_the_same_config_are_caught_by_their_hash(index: OpenIndex) -> None:
    loaded = _loaded()
    loaded.model.get_input_embeddings().weight.mul_(1.5)
    refusal = _refused(index, loaded)
    assert refusal.field == "model weights"
    assert index.artifact.manifest.model.weights_hash[:12] in str(refusal)
    assert identify(loaded)[0].weights_hash[:12] in str(refusal)


@torch.no_grad()
def test_a_change_between_the_sampled_weights_is_caught_by_the_probe(index: OpenIndex) -> None:
    loaded = _loaded()
    for parameter in loaded.model.parameters():
        stride = max(1, parameter.numel() // SAMPLES_PER_TENSOR)
        places = torch.arange(parameter.numel())
        sampled = (places % stride == 0) & (places < stride * SAMPLES_PER_TENSOR)
        change = 0.1 * torch.randn(parameter.numel(), generator=torch.Generator().manual_seed(0))
        parameter.view(-1).add_(torch.where(sampled, 0.0, change))
    assert identify(loaded)[0] == index.artifact.manifest.model.model_copy(update={"id": "another-name"})
    refusal = _refused(index, loaded)
    assert "probe" in refusal.field
    assert f"{index.artifact.manifest.probe.logits[0]:.4f}" in str(refusal)


def _theta(loaded: LoadedModel) -> None:
    loaded.model.config.rope_parameters["rope_theta"] = 77.0


def _window(loaded: LoadedModel) -> None:
    loaded.model.config.sliding_window = 64


@pytest.mark.parametrize(
    ("change", "field", "value"), [(_theta, "rope_parameters", "77.0"), (_window, "sliding_window", "64")]
)
def test_another_config_is_refused_by_the_field_that_differs(
    change: Callable[[LoadedModel], None], field: str, value: str, index: OpenIndex
) -> None:
    loaded = _loaded()
    change(loaded)
    refusal = _refused(index, loaded)
    assert refusal.field == f"model config {field}"
    assert value in str(refusal)


def test_another_family_is_refused(index: OpenIndex) -> None:
    assert _refused(index, LoadedModel(FAMILIES["qwen3"](), tiny_tokenizer(), "x", None)).field.startswith(
        "model config"
    )


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE.replace("assistant", "helper")], ids=["none", "other"])
def test_another_chat_template_is_refused(template: str | None, index: OpenIndex) -> None:
    refusal = _refused(index, _loaded(template))
    assert refusal.field == "chat template"
    assert ("none" in str(refusal)) == (template is None)


def test_another_tokenizer_is_refused(index: OpenIndex) -> None:
    loaded = _loaded()
    loaded.tokenizer.add_tokens(["sparse"])
    assert _refused(index, loaded).field == "tokenizer"


def test_an_index_in_full_precision_opens_with_the_model_in_half(index: OpenIndex) -> None:
    loaded = _loaded()
    loaded.model.to(torch.bfloat16)
    half = open_index(index.artifact, loaded.model, loaded.tokenizer, identify(loaded))
    tokens = random_ids(12)
    exact = plain_logits(index.model, torch.cat([index.input_ids, tokens]))[-len(tokens) :]
    for name in ("squeezed", "quest", "oracle"):
        cache = half.cache(sparse(name, methods()[name](), Budget(1.0)))
        assert_close(stepped_logits(half, cache, tokens, question=4), exact, 0.1)


def test_what_a_method_selects_from_is_the_middle_counted_from_its_first_token(index: OpenIndex) -> None:
    split = index.split
    keys, _ = index.artifact.context(1)
    context = stored_context(LayerRows(index.artifact, 1), "squeezed")
    assert context.first_token == split.sinks
    assert torch.equal(context.keys, keys[:, split.sinks : split.sinks + split.middle])
    order = context.tensors["token_order"].long()
    assert torch.equal(order.sort(dim=1).values, torch.arange(split.middle).expand_as(order))
    assert context.calibration == index.artifact.manifest.methods["squeezed"].calibration
    assert stored_context(LayerRows(index.artifact, 1), "oracle").tensors == {}


def test_an_index_moved_to_another_folder_opens(tmp_path: Path) -> None:
    plan = small_plan()
    built = build_small(tmp_path / "a.skv")
    (tmp_path / "a.skv").rename(tmp_path / "b.skv")
    moved = reopen(plan, tmp_path / "b.skv")
    assert Artifact(tmp_path / "b.skv").manifest == built.artifact.manifest
    tokens = random_ids(6)
    cache = moved.cache(sparse("squeezed", Squeezed(), Budget(1.0)))
    plain = plain_logits(plan.loaded.model, torch.cat([moved.input_ids, tokens]))[-6:]
    assert_close(stepped_logits(moved, cache, tokens, question=3), plain, 1e-4)


def test_pages_of_the_keys_that_a_selector_reads_can_be_released(index: OpenIndex) -> None:
    """The keys' pages belong to one mapping, however often a layer's rows are asked for."""
    rows = LayerRows(index.artifact, 1)
    prepared = prepare_layer(rows, MethodSpec("quest", "", Quest()))
    storages = {
        one.untyped_storage().data_ptr() for one in (prepared.mapped[0], prepared.context.keys, rows.on(CPU)[0])
    }
    assert len(storages) == 1


@pytest.fixture(scope="module")
def every_method(tmp_path_factory: pytest.TempPathFactory) -> tuple[BuildPlan, Path]:
    """A plan of every method and the index that was built by it, to be copied."""
    plan, folder = small_plan(methods=INDEXERS), tmp_path_factory.mktemp("every") / "small.skv"
    build_index(plan, folder)
    return plan, folder


@pytest.mark.parametrize(
    ("name", "method", "residual", "gone"),
    [
        ("multipole", Multipole(), False, "level0.value_centroids"),
        ("multipole", Multipole("hierarchical"), False, "level0.value_centroids"),
        ("multipole", Multipole("hierarchical"), False, "level1.value_centroids"),
        ("squeezed", Squeezed(), False, "level0.value_centroids"),
        ("multipole-windowed", WindowedMultipole(), False, "level0.lookup_centroids"),
        ("multipole-windowed", WindowedMultipole(), False, "level1.lookup_centroids"),
        ("codes", Codes(), False, "level0.value_centroids"),
        ("codes", Codes(), False, "rest_values"),
        ("quest", Quest(), True, "level0.value_centroids"),
    ],
)
def test_a_layer_without_centroids_is_refused(
    every_method: tuple[BuildPlan, Path], tmp_path: Path, name: str, method: Method, residual: bool, gone: str
) -> None:
    """One level's centroids are missing, or all. Kernels would take other rows in their place, or read out of
    bounds."""
    plan, built = every_method
    shutil.copytree(built, tmp_path / "small.skv")
    source = "codes" if residual else name
    change_tensors(tmp_path / "small.skv", layer_file(source, 1), lambda tensors: _without(tensors, gone))
    index = reopen(plan, tmp_path / "small.skv")
    with pytest.raises(ArtifactError, match=f"{gone}.*build the index again"):
        index.cache(sparse(name, method, Budget(0.1), residual=residual))


def test_a_layer_of_one_level_without_values_is_refused(tmp_path: Path) -> None:
    plan = small_plan(methods={"multipole": MultipoleIndexer(levels=(0.25,), block=80)})
    build_index(plan, tmp_path / "small.skv")
    gone = "level0.value_centroids"
    change_tensors(tmp_path / "small.skv", layer_file("multipole", 1), lambda tensors: _without(tensors, gone))
    index = reopen(plan, tmp_path / "small.skv")
    with pytest.raises(ArtifactError, match=f"{gone}.*build the index again"):
        index.cache(sparse("multipole", Multipole(), Budget(0.1)))
    index.cache(sparse("multipole", Multipole(replace=False), Budget(0.1)))


def _without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}
