"""Checkpoints with quantised weights: their identity is that of the stored bytes, and what cannot run is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.causal_families import tiny_config
from support.quantised_models import KINDS, save_quantised
from support.tiny_models import save_tiny
from transformers import AutoConfig

from sparsekv.formats.device import model_bytes
from sparsekv.formats.distributed.group import shares_of
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.models.load import identify, load_model
from sparsekv.formats.models.quantised import checkpoint_of

pytestmark = pytest.mark.quantised


def _weights_hash(folder: Path) -> str:
    return identify(load_model(str(folder), device="cpu"))[0].weights_hash


def _change_byte(folder: Path, name: str) -> None:
    """Change the lowest bit of the first byte of a tensor in the checkpoint's file."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    header = int.from_bytes(data[:8], "little")
    data[8 + header + json.loads(data[8 : 8 + header])[name]["data_offsets"][0]] ^= 1
    file.write_bytes(data)


def _stored_names(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return sorted(file.keys())


@pytest.mark.parametrize("kind", KINDS)
def test_each_stored_byte_belongs_to_the_fingerprint(kind: str, tmp_path: Path) -> None:
    """Scales included, of which a fingerprint of plain weights would not see the last bits."""
    folder = save_quantised(tmp_path / "model", kind)
    before = _weights_hash(folder)
    assert _weights_hash(folder) == before
    layer = [name for name in _stored_names(folder) if "layers.0" in name and not name.endswith("shape")]
    assert len(layer) > 9
    for name in layer:
        _change_byte(folder, name)
        checkpoint = checkpoint_of(load_model(str(folder), device="cpu").model)
        assert checkpoint is not None
        assert checkpoint.fingerprint() != before, name
        _change_byte(folder, name)
    assert _weights_hash(folder) == before


@pytest.mark.parametrize("kind", KINDS)
def test_the_method_belongs_to_the_identity(kind: str, tmp_path: Path) -> None:
    """Even if transformers has made plain weights of the quantised ones, and dropped it from the config."""
    folder = save_quantised(tmp_path / "model", kind)
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert json.loads(str(identify(load_model(str(folder), device="cpu"))[0].quantisation)) == stored


def test_plain_weights_have_no_method(tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny(tmp_path / "model")), device="cpu")
    assert checkpoint_of(loaded.model) is None
    assert identify(loaded)[0].quantisation is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["torchao-int8", "torchao-int4"])
def test_by_default_quantised_weights_compute_in_the_dtype_of_the_checkpoint(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert load_model(str(save_quantised(tmp_path / "model", kind, dtype)), device="cpu").model.dtype == dtype


def test_a_dtype_in_which_the_weights_do_not_compute_is_refused(tmp_path: Path) -> None:
    folder = save_quantised(tmp_path / "model", "torchao-int4", torch.bfloat16)
    with pytest.raises(SparsekvError, match=r"quantised by torchao, does not run in float32 on cpu: .* dtype") as error:
        load_model(str(folder), device="cpu", dtype="float32")
    assert str(error.value).endswith("; use --dtype bfloat16")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"quant_method": "mine"}, r"mine, which does not run here: transformers [\d.]+ does not know this method; "),
        ({"quant_method": "aqlm"}, "aqlm, which does not run here: .*`pip install aqlm.*`; install it"),
        ({"quant_method": "vptq"}, "vptq, which does not run here: .*`pip install.*vptq.*`"),
        ({"quant_method": "quanto"}, "quanto, which does not run here: .*`pip install optimum-quanto`"),
        ({"quant_method": "gptq", "bits": 4}, "gptq, which does not run here: .*`pip install optimum`"),
        ({"quant_method": "awq", "bits": 4}, "awq, which does not run here: .*gptqmodel"),
        ({"load_in_4bit": True}, "bitsandbytes, which does not run here: .*`pip install .*bitsandbytes"),
        ({"bits": 4}, "an unnamed method, which does not run here: .*quant_method"),
    ],
    ids=lambda given: given.get("quant_method") if isinstance(given, dict) else None,
)
def test_what_this_machine_cannot_run_is_refused_before_the_weights_are_read(
    settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """The methods' libraries are not installed here."""
    folder = save_tiny(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UsageError, match=f"^model '{folder}' is quantised by {told}") as error:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(error.value)


def test_damaged_quantised_weights_are_named_in_one_line(tmp_path: Path) -> None:
    folder = save_quantised(tmp_path / "model", "torchao-int8")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SparsekvError, match=r"^the weights of model .* cannot be loaded: ") as error:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_beyond_the_number_of_the_config_are_refused(tmp_path: Path, kind: str) -> None:
    folder = save_quantised(tmp_path / "model", kind)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    fewer = {"layer_types": config["layer_types"][:-1]} if "layer_types" in config else {}
    (folder / "config.json").write_text(json.dumps(config | fewer))
    with pytest.raises(SparsekvError, match="tensors that its config does not allow"):
        load_model(str(folder), device="cpu")


def test_several_ranks_refuse_quantised_weights(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(save_quantised(tmp_path / "model", "torchao-int8"))
    with pytest.raises(UsageError, match=r"^model 'tiny' has quantised weights, which are not split over ranks"):
        shares_of(config, "tiny", 2)


def test_the_bytes_of_a_model_are_those_of_its_stored_tensors(tmp_path: Path) -> None:
    """A tensor of torchao reports the size that it would have without quantisation."""
    folder = save_quantised(tmp_path / "model", "torchao-int8")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 (it is no mapping)
    model = load_model(str(folder), device="cpu").model
    assert model_bytes(model) == stored + sum(buffer.nbytes for buffer in model.buffers())


def test_several_ranks_refuse_latent_attention() -> None:
    with pytest.raises(UsageError, match=r"^model 'tiny' has latent attention \(MLA\), which is not split"):
        shares_of(tiny_config("deepseek_v2"), "tiny", 2)
