"""A causal language model made from its config and the weights in its folder, read to a GPU where there is one."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sparsekv.formats.device import device_reader, map_pages, run_beside
from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.models.find import first_line

INDEX = "model.safetensors.index.json"


def weights_on(folder: Path, config: PreTrainedConfig, device: torch.device) -> dict[str, torch.Tensor] | None:
    """All tensors of a checkpoint, by the names that it gives them, on a GPU in the checkpoint's own dtypes.

    Allocates the weights once: `from_pretrained` takes these tensors as they are if their dtype is the model's.

    Returns:
        None where transformers reads them otherwise than file by file: on a CPU, with adapters, quantised, or in
        files by other names.

    Raises:
        OSError: a file is missing, ends early or cannot be read.
        SafetensorError: a file is no safetensors file.
    """
    files = _plain_files(folder, config) if device.type == "cuda" else []
    if not files:
        return None
    found: dict[str, torch.Tensor] = {}
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            with safe_open(f"/proc/self/fd/{descriptor}", framework="pt") as mapped:
                like = {name: mapped.get_tensor(name) for name in mapped.keys()}  # noqa: SIM118 (it is no mapping)
            found |= device_reader(device).read(descriptor, like, {})
        finally:
            os.close(descriptor)
    return found


def mapped_weights(folder: Path, config: PreTrainedConfig) -> dict[str, torch.Tensor] | None:
    """All tensors of a checkpoint, by the names that it gives them, as views of its files' mappings.

    A thread maps their pages, beside whatever comes before the model is made of them: whoever reads the weights first,
    the fingerprint or a step, finds them there.

    Returns:
        None where transformers reads them otherwise than file by file, and where they cannot be read: transformers then
        tells why.
    """
    found: dict[str, torch.Tensor] = {}
    try:
        for file in _plain_files(folder, config):
            with safe_open(file, framework="pt") as mapped:
                found |= {name: mapped.get_tensor(name) for name in mapped.keys()}  # noqa: SIM118 (it is no mapping)
        run_beside(map_pages(list(found.values())), "mapping-weights")
    except (OSError, TypeError, ValueError, RuntimeError, MemoryError, SafetensorError):
        return None
    return found or None


def _plain_files(folder: Path, config: PreTrainedConfig) -> list[Path]:
    """The checkpoint's files; nothing where transformers does not read them file by file and as they are."""
    special = [getattr(config, name, None) for name in ("transformers_weights", "quantization_config", "extra_files")]
    # Of a config for pictures too, transformers makes the language model of a part.
    special += [config.get_text_config() is not config, (folder / "adapter_config.json").exists()]
    return [] if any(special) else _files(folder)


def _files(folder: Path) -> list[Path]:
    """The checkpoint's files: one, or the shards that its index names; nothing if there is neither."""
    whole, index = folder / "model.safetensors", folder / INDEX
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [folder / Path(name).name for name in sorted(names)]


Weights: TypeAlias = dict[str, torch.Tensor]
"""Tensors of a checkpoint, by the names that it gives them."""

_NO_MEMORY = ("allocate memory", "bad_alloc", "not enough memory", "unable to mmap", "start new thread")
"""Parts of the messages by which torch, safetensors and Python report lack of memory, in errors of many classes."""
_UNREADABLE = (OSError, LookupError, TypeError, ValueError, RuntimeError, ImportError, MemoryError, SafetensorError)
"""Exceptions of reading weights that are damaged or of another model."""


def causal_model(
    folder: Path,
    name: str,
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    ranks: int = 1,
    mapped: Weights | None = None,
) -> PreTrainedModel:
    """A causal language model in evaluation mode, with the weights in a folder.

    Args:
        ranks: how many processes, this one among them, load a share of it each.
        mapped: the folder's weights where they are mapped already, for a CPU.

    Raises:
        UsageError: the ranks cannot share it.
        SparsekvError: weights that are damaged, incomplete or larger than the device's memory.
    """
    for weights in folder.glob("*.safetensors"):
        # Raises a permission error here; safetensors would report a missing file instead.
        weights.open("rb").close()
    try:
        if ranks > 1:
            loaded = _share(folder, name, config, dtype, ranks)
        else:
            loaded = _loaded(folder, config, device, dtype, mapped)
    except torch.OutOfMemoryError:
        raise SparsekvError(
            f"model '{name}' in {dtype} does not fit the memory of {device}; use --dtype bfloat16 or --device cpu"
        ) from None
    except _UNREADABLE as error:
        raise SparsekvError(_why_not(error, name, device, dtype)) from None
    if missing := sorted(loaded[1]["missing_keys"]):
        raise SparsekvError(
            f"model '{name}' lacks {len(missing)} weights of a causal language model (the first: {missing[0]}); "
            "transformers would fill them with random numbers: choose a checkpoint with all of them"
        )
    model: PreTrainedModel = loaded[0].eval()
    return model


def _why_not(error: Exception, name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The reason and the remedy for an exception of loading weights."""
    if isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY):
        return (
            f"not enough memory for model '{name}' in {str(dtype).removeprefix('torch.')} on {device}; free some, "
            "or use --dtype bfloat16 or a smaller model"
        )
    return (
        f"the weights of model '{name}' cannot be loaded: {first_line(error)}; they must be whole, in safetensors "
        "files, and match config.json"
    )


def _loaded(
    folder: Path, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, mapped: Weights | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model with its weights, and what transformers says of their loading."""
    how: dict[str, Any] = {"config": config, "dtype": dtype, "output_loading_info": True}
    weights = mapped
    if device.type != "cpu":
        how["device_map"] = device
        weights = weights_on(folder, config, device)
    if weights is None:
        return _from_folder(folder, how)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    answers = None
    with suppress(OSError):  # without one that can be read transformers takes the model's own
        answers = GenerationConfig.from_pretrained(folder)
    loaded: tuple[PreTrainedModel, dict[str, Any]] = kind.from_pretrained(
        None, state_dict=weights, generation_config=answers, **how
    )
    loaded[0].config.name_or_path = str(folder)
    return loaded


def _share(
    folder: Path, name: str, config: PreTrainedConfig, dtype: torch.dtype, ranks: int
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """This rank's share of a model, which transformers reads and puts on the rank's device."""
    from sparsekv.formats.distributed.group import shares_of  # here: it imports torch.distributed

    shares = shares_of(config, name, ranks)
    return _from_folder(
        folder, {"config": config, "dtype": dtype, "output_loading_info": True, "distributed_config": shares}
    )


def _from_folder(folder: Path, how: dict[str, Any]) -> tuple[PreTrainedModel, dict[str, Any]]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, trust_remote_code=False, **how)
    return loaded[0], loaded[1]
