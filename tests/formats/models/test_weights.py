"""Weights that are read to a GPU, or mapped for a CPU, make the model that transformers makes of the same folder."""

import json
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import END, FAMILIES, save_tiny
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    Llama4Config,
    Llama4ForConditionalGeneration,
    PreTrainedModel,
)

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.models.causal_model import mapped_weights, weights_on, without_adapter
from sparsekv.formats.models.load import load_model

GPU = torch.device("cuda", 0)


def _saved(folder: Path, family: str, shards: bool) -> Path:
    """A tiny model in a folder, its weights in one file or in several."""
    save_tiny(folder, family)
    GenerationConfig(eos_token_id=[3, 5]).save_pretrained(folder)
    if shards:
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
        (folder / "model.safetensors").unlink(missing_ok=True)
    return folder


def _assert_same(ours: PreTrainedModel, plain: PreTrainedModel) -> None:
    assert type(ours) is type(plain)
    assert ours.config.to_dict() == plain.config.to_dict()
    assert ours.generation_config.to_dict() == plain.generation_config.to_dict()
    expected = plain.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, weight in ours.state_dict().items():
        assert weight.dtype == expected[name].dtype
        assert torch.equal(weight, expected[name]), name
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, dict(plain.named_buffers())[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_model_is_the_same(tmp_path: Path, family: str, shards: bool, dtype: str) -> None:
    folder = _saved(tmp_path / "model", family, shards)
    assert weights_on(folder, AutoConfig.from_pretrained(folder), GPU) is not None
    ours = load_model(str(folder), device="cuda", dtype=dtype).model
    _assert_same(ours, AutoModelForCausalLM.from_pretrained(folder, device_map=GPU, dtype=ours.dtype))


@pytest.mark.gpu
def test_a_shard_that_is_missing_or_cut_is_named_as_one_line(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SparsekvError, match="cannot be loaded") as refused:
        load_model(str(folder), device="cuda")
    assert "\n" not in str(refused.value)


@pytest.mark.thinned
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("shards", "dtype"), [*product([False, True], ["auto", "bfloat16"])], ids=str)
def test_a_model_of_mapped_weights_is_the_same(tmp_path: Path, family: str, shards: bool, dtype: str) -> None:
    folder = _saved(tmp_path / "model", family, shards)
    assert mapped_weights(folder, AutoConfig.from_pretrained(folder)) is not None
    ours = load_model(str(folder), device="cpu", dtype=dtype).model
    _assert_same(ours, AutoModelForCausalLM.from_pretrained(folder, dtype=ours.dtype))


@pytest.mark.parametrize("beside", ["adapter_config.json", "model.safetensors"])
def test_weights_that_are_not_plain_files_are_left_to_transformers(tmp_path: Path, beside: str) -> None:
    folder = save_tiny(tmp_path / "model")
    (folder / beside).write_text("{}")
    assert mapped_weights(folder, AutoConfig.from_pretrained(folder)) is None


def test_a_model_for_pictures_too_is_left_to_transformers(tmp_path: Path) -> None:
    """Its config is one of parts, of which transformers takes the language model's."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"intermediate_size_mlp": 48, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 260}
    text |= {"num_local_experts": 2, "layer_types": ["full_attention"] * 2, "pad_token_id": 1}
    vision = sizes | {"num_hidden_layers": 1, "vision_output_dim": 32, "image_size": 28, "patch_size": 14}
    vision |= {"projector_input_dim": 32, "projector_output_dim": 32}
    folder = save_tiny(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    whole = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision))
    whole.save_pretrained(folder)
    assert mapped_weights(folder, AutoConfig.from_pretrained(folder)) is None
    ours, plain = load_model(str(folder), device="cpu").model, AutoModelForCausalLM.from_pretrained(folder)
    assert type(ours) is type(plain)
    assert all(torch.equal(*both) for both in zip(ours.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("end", [END, [END, 3], None])
def test_without_settings_of_answers_they_are_those_of_the_config(tmp_path: Path, end: Any) -> None:
    """Not those of the config's class: Llama's default ends answers with token 2, which may be a letter here."""
    folder = save_tiny(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    added = {} if end is None else {"eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(config | added | {"repetition_penalty": 1.5}))
    ours, plain = load_model(str(folder), device="cpu").model, AutoModelForCausalLM.from_pretrained(folder)
    assert ours.generation_config.to_dict() == plain.generation_config.to_dict()
    assert ours.generation_config.eos_token_id == end


@pytest.mark.parametrize("text", ["", "[]", "null", "{not json", '{"eos_token_id": [1, 2', '\ufeff{"eos_token_id": 1}'])
def test_damaged_settings_of_answers_are_refused(tmp_path: Path, text: str) -> None:
    """The settings name the tokens that end an answer, and transformers would ignore damaged settings."""
    folder = save_tiny(tmp_path / "model")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(SparsekvError, match=r"generation_config\.json that cannot be read .*get the file again"):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize("ends", ['"258"', "258.0", "true", "[[258]]", "[258, null]", '[258, "257"]'])
def test_an_end_of_answers_that_is_no_token_id_is_refused(tmp_path: Path, ends: str) -> None:
    """No token of an answer would equal it."""
    folder = save_tiny(tmp_path / "model")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    with pytest.raises(SparsekvError, match=r"has the EOS token .* in generation_config\.json, which is not a token"):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize("ends", ["null", "-1", "[258]", "[258, 257]"])
def test_ends_of_answers_may_be_none_or_several(tmp_path: Path, ends: str) -> None:
    folder = save_tiny(tmp_path / "model")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    assert load_model(str(folder), device="cpu").model.generation_config.eos_token_id == json.loads(ends)


def test_without_a_gpu_none_are_read_to_it(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    assert weights_on(folder, AutoConfig.from_pretrained(folder), torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("tensor", "refused"),
    [
        ("model.layers.1.self_attn.q_proj.bias", True),
        ("model.layers.1.self_attn.q_norm.weight", True),
        ("model.norm.bias", True),
        ("model.layers.1.self_attn.rotary_emb.inv_freq", False),
        ("model.layers.1.self_attn.masked_bias", False),
        ("vision.layers.1.self_attn.q_proj.bias", False),
    ],
)
def test_tensors_of_layers_that_the_config_denies_are_refused(tmp_path: Path, tensor: str, refused: bool) -> None:
    weights = save_tiny(tmp_path) / "model.safetensors"
    save_file(load_file(weights) | {tensor: torch.ones(3)}, weights, metadata={"format": "pt"})
    with pytest.raises(SparsekvError, match=f"1 tensors .*the first: {tensor}") if refused else nullcontext():
        load_model(str(tmp_path), device="cpu")


@pytest.mark.thinned
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [AutoModelForCausalLM, AutoModel], ids=["causal", "base"])
def test_layers_beyond_the_number_of_the_config_are_refused(tmp_path: Path, family: str, kind: Any) -> None:
    """transformers would ignore them. A checkpoint of the model without its head has other names."""
    save_tiny(tmp_path, family)
    kind.from_pretrained(tmp_path).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    head = {} if kind is AutoModelForCausalLM else {"lm_head.weight": weights["embed_tokens.weight"].clone()}
    save_file(weights | head, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    fewer = {name: config[name][:-1] for name in ("layer_types", "no_rope_layers") if config.get(name)}
    (tmp_path / "config.json").write_text(json.dumps(config | fewer))
    first = rf"the first: (model\.)?layers\.{config['num_hidden_layers']}\."
    with pytest.raises(SparsekvError, match=rf"its config does not allow \({first}.*correct config.json"):
        load_model(str(tmp_path), device="cpu")


def test_draft_layers_after_the_own_ones_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3 and others store layers for multi-token prediction so."""
    weights = save_tiny(tmp_path) / "model.safetensors"
    own = load_file(weights)
    for tensor in ("eh_proj.weight", "enorm.weight", "self_attn.q_proj.weight", "shared_head.norm.weight"):
        own[f"model.layers.3.{tensor}"] = torch.ones(3)
    save_file(own, weights, metadata={"format": "pt"})
    assert load_model(str(tmp_path), device="cpu").model.config.num_hidden_layers == 3


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_two_different_tensors_of_a_name_are_refused(tmp_path: Path, factor: float) -> None:
    folder = _saved(tmp_path / "model", "llama", shards=True)
    first, *_, last = sorted(folder.glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(last) | {name: factor * tensor}, last, metadata={"format": "pt"})
    refused = pytest.raises(SparsekvError, match=f"two different tensors {name}, in {first.name} and {last.name}")
    with nullcontext() if factor == 1 else refused:
        load_model(str(folder), device="cpu")


def test_a_base_model_is_loaded_without_its_adapter(tmp_path: Path) -> None:
    """transformers would report the adapter's missing weights alone."""
    files = {path.name: path.read_bytes() for path in save_tiny(tmp_path).iterdir()}
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    with without_adapter(tmp_path) as base:
        assert {path.name: path.read_bytes() for path in base.iterdir()} == files
    assert not base.exists()
