"""Create a causal language model from its config and the weights in its folder.

Plain weights are read straight into a GPU's memory, or memory-mapped for a CPU.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sparsekv.formats.device import device_reader, map_pages, run_beside
from sparsekv.formats.errors import SparsekvError, first_line, reason_of

INDEX = "model.safetensors.index.json"


def weights_on(folder: Path, config: PreTrainedConfig, device: torch.device) -> dict[str, torch.Tensor] | None:
    """Read all tensors of a checkpoint into a GPU's memory, with the names and dtypes that they have in the checkpoint.

    If a checkpoint's dtype is the model's, the weights are allocated only once, because `from_pretrained` then uses the
    tensors without a copy.

    Returns:
        The tensors by name. None if transformers must read the weights: for a CPU, a multimodal model, an adapter,
        quantised weights, or files with other names.

    Raises:
        OSError: a file is missing, truncated or unreadable.
        SafetensorError: a file is not a safetensors file.
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
    """Return all tensors of a checkpoint, by their names in the checkpoint, as views of its memory-mapped files.

    A background thread maps the files' pages. The first use of the weights, by their fingerprint or by a forward pass,
    then causes fewer page faults.

    Returns:
        The tensors by name. None if transformers must read the weights, or if the weights cannot be read; transformers
        then reports the reason.
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
    """Return a checkpoint's `weight_files`; an empty list if transformers would change or leave out their tensors."""
    special = [getattr(config, name, None) for name in ("transformers_weights", "quantization_config", "extra_files")]
    # For a multimodal config transformers creates the language model from one part of the checkpoint.
    special += [config.get_text_config() is not config, (folder / "adapter_config.json").exists()]
    return [] if any(special) else weight_files(folder)


def weight_files(folder: Path) -> list[Path]:
    """Return a checkpoint's files: the single file, or the shards in its index; an empty list without either."""
    whole, index = folder / "model.safetensors", folder / INDEX
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [folder / Path(name).name for name in sorted(names)]


Weights: TypeAlias = dict[str, torch.Tensor]
"""Tensors of a checkpoint, by their names in the checkpoint."""

_NO_MEMORY = ("allocate memory", "bad_alloc", "not enough memory", "unable to mmap", "start new thread")
"""Parts of error messages when memory runs out. Torch, safetensors and Python raise different exceptions for it."""
_UNREADABLE = (OSError, LookupError, TypeError, ValueError, RuntimeError, ImportError, MemoryError, SafetensorError)
"""Exceptions raised for weights that are damaged or belong to another model."""


def causal_model(
    folder: Path,
    name: str,
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    ranks: int = 1,
    mapped: Weights | None = None,
) -> PreTrainedModel:
    """Load a causal language model, in evaluation mode, with the weights in a folder.

    Args:
        ranks: number of processes, including this one, that each load a part of the model.
        mapped: the folder's weights if they are memory-mapped already, for a CPU.

    Raises:
        UsageError: the model cannot be divided among the ranks.
        SparsekvError: the weights are damaged, incomplete or larger than the device's memory.
        OSError: a file of weights cannot be opened, as without permission.
    """
    for weights in folder.glob("*.safetensors"):
        # Raises a permission error here; safetensors would report a missing file instead.
        weights.open("rb").close()
    _check_generation_config(folder, name)
    with suppress(*_UNREADABLE):  # the reason of damaged files is reported when they are loaded
        _check_shards(folder, name)
    try:
        if ranks > 1:
            loaded = _share(folder, name, config, dtype, ranks)
        else:
            loaded = _loaded(folder, config, device, dtype, mapped)
    except torch.OutOfMemoryError:
        smaller = "--dtype bfloat16 or " if dtype.itemsize > 2 else ""
        raise SparsekvError(
            f"model '{name}' in {dtype} does not fit the memory of {device}; use {smaller}--device cpu"
        ) from None
    except _UNREADABLE as error:
        raise SparsekvError(_why_not(error, name, device, dtype)) from None
    if missing := sorted(loaded.missing):
        raise SparsekvError(
            f"model '{name}' lacks {len(missing)} weights of a causal language model (the first: {missing[0]}); "
            "transformers would fill them with random numbers: choose a checkpoint with all of them"
        )
    if ignored := sorted(loaded.ignored):
        raise SparsekvError(
            f"the files of model '{name}' have {len(ignored)} tensors that its config does not allow (the first: "
            f"{ignored[0]}); transformers would ignore them: correct config.json, or choose another checkpoint"
        )
    model: PreTrainedModel = loaded.model.eval()
    return model


@dataclass(frozen=True)
class _Loaded:
    """A loaded model, the names of its weights that its files lack, and the names of the files' tensors it ignores."""

    model: PreTrainedModel
    missing: Collection[str]
    ignored: Collection[str]

    @classmethod
    def of(cls, model: PreTrainedModel, report: dict[str, Any]) -> Self:
        """Make this from transformers' report."""
        return cls(model, report["missing_keys"], _ignored(model, report["unexpected_keys"]))


def _ignored(model: PreTrainedModel, unexpected: Collection[str]) -> list[str]:
    """Return the tensors of a checkpoint that would change logits if the config had not left them out of the model.

    These are tensors of a layer beyond the config's number of layers. They are also tensors that a layer of the model
    lacks, such as a bias that the config denies.

    Other unexpected tensors do not change logits: those of a vision tower or of draft layers, or buffers such as masks.
    Quantised layers may have scales that they do not need.
    """
    modules = dict(model.named_modules())
    blocks = [f"{name}." for name, module in modules.items() if isinstance(modules.get(_above(name)), nn.ModuleList)]
    layers = {f"{name}.": len(module) for name, module in modules.items() if isinstance(module, nn.ModuleList)}
    quantised = getattr(model, "hf_quantizer", None) is not None
    # A checkpoint of the model without its head has names without this prefix.
    named = {key: (key, f"{model.base_model_prefix}.{key}") for key in unexpected}
    extra = {key: layer for key, names in named.items() if (layer := _beyond(names, layers)) is not None}
    drafting = {layer for key, layer in extra.items() if DRAFT in key.split(".")}

    def counts(key: str) -> bool:
        if (holder := modules.get(_above(key))) is not None:
            return not any(holder.children()) and any(True for _ in holder.parameters())
        return key.endswith((".weight", ".bias")) and key.startswith(tuple(blocks))

    denied = [] if quantised else [key for key, names in named.items() if any(map(counts, names))]
    return sorted({*denied, *(key for key, layer in extra.items() if layer not in drafting)})


DRAFT = "eh_proj"
"""Name of a projection that only draft layers for multi-token prediction have. DeepSeek-V3, GLM-4-MoE and others store
these layers after the model's own, and transformers leaves them out."""


def _beyond(names: Collection[str], layers: Mapping[str, int]) -> str | None:
    """Return the layer of a tensor, such as "model.layers.30", if the model has fewer layers; None otherwise.

    Args:
        names: the names that the tensor may have in the model.
        layers: the lengths of the model's lists of layers, by their names with a dot at the end.
    """
    for name, (prefix, length) in product(names, layers.items()):
        place = name.removeprefix(prefix).partition(".")[0]
        if name.startswith(prefix) and place.isdecimal() and int(place) >= length:
            return prefix + place
    return None


def _above(name: str) -> str:
    """Return the name of the module that contains a module or tensor, from the name of the latter."""
    return name.rpartition(".")[0]


def _check_shards(folder: Path, name: str) -> None:
    """Raise SparsekvError if two shards have different tensors of the same name, because transformers uses the last.

    Raises the errors of `_UNREADABLE` for damaged files.
    """
    first: dict[str, Path] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as shard:
            for key in shard.keys():  # noqa: SIM118 (it is no mapping)
                if (other := first.setdefault(key, file)) == file:
                    continue
                with safe_open(other, framework="pt") as earlier:
                    same = torch.equal(earlier.get_tensor(key), shard.get_tensor(key))
                if not same:
                    raise SparsekvError(
                        f"model '{name}' has two different tensors {key}, in {other.name} and {file.name}; get the "
                        "files again, or choose another checkpoint"
                    )


def _check_generation_config(folder: Path, name: str) -> None:
    """Raise SparsekvError if generation_config.json is damaged, or if an EOS token in it is not a token id.

    transformers would ignore a damaged file. No token of an answer would equal an EOS token that is not an id.
    """
    file = folder / "generation_config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if not isinstance(settings, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise SparsekvError(
            f"model '{name}' has a {file.name} that cannot be read ({reason_of(error)}), and the file's EOS tokens end "
            "answers; get the file again, or delete it"
        ) from None
    ends = settings.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if wrong := [one for one in listed if type(one) is not int]:
        raise SparsekvError(
            f"model '{name}' has the EOS token {json.dumps(wrong[0])} in {file.name}, which is not a token id, so that "
            "no answer would end with it; write its number there, or get the file again"
        )


def _why_not(error: Exception, name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return an error message, with reason and remedy, for an exception raised while weights were loaded."""
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
) -> _Loaded:
    """Load a model and find the weights that are missing or ignored."""
    how: dict[str, Any] = {"config": config, "dtype": dtype, "output_loading_info": True}
    weights = mapped
    if device.type != "cpu":
        how["device_map"] = device
        weights = weights_on(folder, config, device)
    elif weights is None:
        how["device_map"] = device  # without a device, some quantisation methods choose a GPU
    if (folder / "adapter_config.json").exists():
        return _with_adapter(folder, how)
    if weights is None:
        return _from_folder(folder, how)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        answers = GenerationConfig.from_pretrained(folder)
    except OSError:  # without the file transformers reads config.json, without the defaults of the config's class
        answers = GenerationConfig.from_pretrained(folder, "config.json", _from_model_config=True)
    loaded = _Loaded.of(*kind.from_pretrained(None, state_dict=weights, generation_config=answers, **how))
    loaded.model.config.name_or_path = str(folder)
    return loaded


def _share(folder: Path, name: str, config: PreTrainedConfig, dtype: torch.dtype, ranks: int) -> _Loaded:
    """Load this rank's part of a model. Transformers reads the weights to the rank's device."""
    from sparsekv.formats.distributed.group import shares_of  # the module imports torch.distributed

    shares = shares_of(config, name, ranks)
    return _from_folder(
        folder, {"config": config, "dtype": dtype, "output_loading_info": True, "distributed_config": shares}
    )


def _from_folder(folder: Path, how: dict[str, Any]) -> _Loaded:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, trust_remote_code=False, **how)
    return _Loaded.of(*loaded)


def _with_adapter(folder: Path, how: dict[str, Any]) -> _Loaded:
    """Load a model, then its adapter, and find missing and ignored weights of both.

    `from_pretrained` would load both at once, but report only the adapter's missing weights.
    """
    with without_adapter(folder) as base:
        loaded = _from_folder(base, how)
    model = loaded.model
    model.config.name_or_path = str(folder)
    quantiser = getattr(model, "hf_quantizer", None)
    added = model.load_adapter(str(folder), use_safetensors=True, dtype=how["dtype"], hf_quantizer=quantiser)
    return _Loaded(model, {*loaded.missing, *added.missing_keys}, {*loaded.ignored, *added.unexpected_keys})


@contextmanager
def without_adapter(folder: Path) -> Iterator[Path]:
    """Make a temporary folder with links to a model's files, except those of its adapter."""
    with TemporaryDirectory() as base:
        for path in folder.iterdir():
            if not path.name.startswith("adapter_"):
                (Path(base) / path.name).symlink_to(path.absolute())
        yield Path(base)
