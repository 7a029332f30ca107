"""Reads a checkpoint's weights to a GPU, where transformers would copy them from a memory mapping, tensor by tensor, or
maps them for a CPU before transformers would."""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from sparsekv.formats.beside import run_beside
from sparsekv.formats.device_read import device_reader
from sparsekv.formats.pages import map_pages

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
