"""Which indices an engine may load: those of its model and tokenizer, whose rows it continues as the build would."""

from pathlib import Path

import pytest
import torch
from support.artifacts import small_manifest
from support.small_index import build_small
from support.tiny_models import save_tiny, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from sparsekv.formats.errors import ArtifactError, IdentityError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import KVStorage, Manifest, PrefillRecord
from sparsekv.runtime.vllm.identity import ServedModel, check_rows, identify_served, row_tolerance, share_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_small(tmp_path_factory.mktemp("index") / "small.skv").artifact


@pytest.fixture(scope="module")
def manifest(index: Artifact) -> Manifest:
    return index.manifest


def served(model: Path, tokenizer: Path | None = None, rounding: str | None = None, **overrides: object) -> ServedModel:
    config = AutoConfig.from_pretrained(model)
    config.update(overrides)
    return identify_served(str(model), str(tokenizer or model), config, rounding)


def refused(manifest: Manifest, by: ServedModel) -> str:
    with pytest.raises(IdentityError) as error:
        by.check(manifest)
    assert "\n" not in str(error.value)
    return error.value.field


def test_the_model_of_the_build_is_accepted_in_any_dtype(manifest: Manifest, model: Path, tmp_path: Path) -> None:
    served(model).check(manifest)
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    served(tmp_path).check(manifest)


def test_other_weights_are_refused(manifest: Manifest, model: Path, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(model)
    other.model.layers[1].self_attn.k_proj.weight.data.mul_(1.5)
    other.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert refused(manifest, served(tmp_path)) == "model weights"


def test_another_rope_of_the_engine_is_refused(manifest: Manifest, model: Path) -> None:
    """The engine has another rope by `--hf-overrides`; the model's folder is that of the build."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert refused(manifest, served(model, rope_parameters=rope)) == "model config rope_parameters"


def test_weights_that_the_engine_rounds_are_refused(manifest: Manifest, model: Path) -> None:
    assert refused(manifest, served(model, rounding="fp8")) == "precision of weights"


def test_another_tokenizer_or_template_is_refused(manifest: Manifest, model: Path, tmp_path: Path) -> None:
    template = tiny_tokenizer("{{ messages[0]['content'] }}")
    template.save_pretrained(tmp_path / "template")
    more = tiny_tokenizer()
    more.add_tokens(["another"])
    more.save_pretrained(tmp_path / "more")
    for name in ("template", "more"):
        AutoConfig.from_pretrained(model).save_pretrained(tmp_path / name)
    assert refused(manifest, served(model, tmp_path / "template")) == "chat template"
    assert refused(manifest, served(model, tmp_path / "more")) == "tokenizer"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"prefill": PrefillRecord(kind="quoka", chunk_size=64, parameters={"budget": 8}, exact=False)},
            "sparse prefill",
        ),
        ({"rope": {"rope_type": "longrope", "factor": 4.0}}, "length of a sequence"),
    ],
    ids=["sparse", "longrope"],
)
def test_rows_that_an_engine_would_continue_otherwise_are_refused(
    manifest: Manifest, model: Path, change: dict[str, object], said: str
) -> None:
    by = served(model)
    if "rope" in change:
        config = {**manifest.model.kv_config, "rope_parameters": change.pop("rope")}
        own = manifest.model.model_copy(update={"kv_config": config})
        change["model"], by = own, ServedModel(own, by.tokenizer, by.dtype)
    with pytest.raises(ArtifactError, match=said):
        by.check(manifest.model_copy(update=change))


def test_one_layer_that_differs_is_refused_and_rounding_is_not() -> None:
    exact = small_manifest()
    tolerance = row_tolerance(exact, torch.float32, rounded=False)
    assert check_rows(exact, [1e-5, 1e-3, 1e-4], tolerance) == pytest.approx(1e-3)
    for off in (0.01, float("nan")):
        with pytest.raises(ArtifactError, match="the engine computes keys and values"):
            check_rows(exact, [1e-5, 1e-5, off], tolerance)


def test_a_coarser_dtype_of_engine_or_storage_allows_its_own_rounding() -> None:
    exact = small_manifest()
    storage = KVStorage(dtype="int8", errors=[0.01], measured_ids="0" * 64, measured_tokens=4)
    in_8_bits = exact.model_copy(update={"kv_storage": storage})
    allowed = [
        row_tolerance(exact, torch.float32, rounded=False),
        row_tolerance(exact, torch.bfloat16, rounded=False),
        row_tolerance(exact, torch.float32, rounded=True),
        row_tolerance(in_8_bits, torch.float32, rounded=False),
    ]
    assert allowed == pytest.approx([0.002, 0.1, 0.2, 0.1])
    # Rounding may route the tokens of one layer to another expert.
    assert check_rows(in_8_bits, [0.01, 0.02, 0.9], allowed[3]) == pytest.approx(0.02)
    with pytest.raises(ArtifactError):
        check_rows(in_8_bits, [0.01, 0.9, 0.9], allowed[3])


@pytest.mark.parametrize(
    ("rank", "size", "heads"), [(0, 1, (0, 1)), (0, 2, (0,)), (1, 2, (1,)), (1, 4, (0,)), (2, 4, (1,)), (3, 4, (1,))]
)
def test_each_worker_reads_its_own_heads(index: Artifact, rank: int, size: int, heads: tuple[int, ...]) -> None:
    """Two heads of 16 channels. A worker of a pipeline has some of the layers."""
    share = share_of(index, rank, size, {1: (len(heads), 16)})
    for part, whole in zip(share.context(1), index.context(1), strict=True):
        assert torch.equal(part, whole[list(heads)])


@pytest.mark.parametrize("shapes", [{0: (2, 32)}, {0: (1, 16)}, {9: (2, 16)}], ids=["channels", "heads", "layer"])
def test_another_shape_of_the_engines_layers_is_refused(index: Artifact, shapes: dict[int, tuple[int, int]]) -> None:
    with pytest.raises(ArtifactError, match="other layers, heads or channels"):
        share_of(index, 0, 1, shapes)
