"""Weights that are read to a GPU make the model that transformers makes of the same folder."""

from pathlib import Path

import pytest
import torch
from support.tiny_models import save_tiny
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.models.load import load_model
from sparsekv.formats.models.weights import weights_on

GPU = torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_model_is_the_same(tmp_path: Path, family: str, shards: bool, dtype: str) -> None:
    folder = save_tiny(tmp_path / "model", family)
    GenerationConfig(eos_token_id=[3, 5]).save_pretrained(folder)
    if shards:
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
        (folder / "model.safetensors").unlink(missing_ok=True)
    assert weights_on(folder, AutoConfig.from_pretrained(folder), GPU) is not None
    ours = load_model(str(folder), device="cuda", dtype=dtype).model
    plain = AutoModelForCausalLM.from_pretrained(folder, device_map=GPU, dtype=ours.dtype)
    assert type(ours) is type(plain)
    assert ours.generation_config.to_dict() == plain.generation_config.to_dict()
    expected = plain.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, weight in ours.state_dict().items():
        assert weight.dtype == expected[name].dtype
        assert torch.equal(weight, expected[name]), name
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, dict(plain.named_buffers())[name]), name


@pytest.mark.gpu
def test_a_shard_that_is_missing_or_cut_is_named_as_one_line(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SparsekvError, match="cannot be loaded") as refused:
        load_model(str(folder), device="cuda")
    assert "\n" not in str(refused.value)


def test_without_a_gpu_transformers_reads(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    assert weights_on(folder, AutoConfig.from_pretrained(folder), torch.device("cpu")) is None
