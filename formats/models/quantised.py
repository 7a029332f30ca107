"""Checkpoints with quantised weights: a check whether they run on this machine, and a fingerprint of their files."""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel, __version__
from transformers.quantizers.auto import AutoHfQuantizer

from sparsekv.formats.errors import SparsekvError, UsageError, first_line
from sparsekv.formats.index.identity import fingerprint_weights
from sparsekv.formats.models.causal_model import weight_files

OTHER = "choose another model or --device"
ADAPTER = "adapter_model.safetensors"
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype for each number of bytes of a stored value."""


@dataclass(frozen=True)
class QuantisedCheckpoint:
    """A checkpoint with quantised weights.

    Attributes:
        folder: the folder of config.json and the weights.
        settings: `quantization_config` as in config.json.
        dtype: the config's dtype, in which the model computes; bfloat16 if the config has none.
    """

    folder: Path
    settings: Mapping[str, Any]
    dtype: torch.dtype

    @classmethod
    def of(cls, folder: Path, config: PreTrainedConfig) -> "QuantisedCheckpoint | None":
        """Return the quantised checkpoint of a folder and its config; None if the weights are not quantised.

        Call this method before a model is made from the config.
        """
        text = config.get_text_config()
        settings = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
        if not isinstance(settings, Mapping):
            return None
        own = config.dtype or text.dtype
        return cls(folder, dict(settings), own if isinstance(own, torch.dtype) else torch.bfloat16)

    @property
    def method(self) -> str:
        """The name of the quantisation method, such as torchao."""
        early_form = self.settings.get("load_in_8bit") or self.settings.get("load_in_4bit")
        return str(self.settings.get("quant_method") or ("bitsandbytes" if early_form else "an unnamed method"))

    def check(self, name: str, device: torch.device) -> None:
        """Raise UsageError if the installed libraries cannot run the quantised weights on a device."""
        settings = dict(self.settings)
        try:
            if not AutoHfQuantizer.supports_quant_method(settings):  # transformers would ignore the quantisation
                raise ValueError(f"transformers {__version__} does not know this method")
            AutoHfQuantizer.from_config(settings, pre_quantized=True).validate_environment(
                device_map={"": device}, weights_only=True
            )
        except Exception as error:  # each method checks its own libraries, by exceptions of many classes
            remedy = "install it, or choose another model" if isinstance(error, ImportError) else OTHER
            if isinstance(error, ModuleNotFoundError) and error.name:
                remedy = f"install it with `pip install {error.name}`"
            reason = first_line(error).rstrip(".")
            raise UsageError(
                f"model '{name}' is quantised by {self.method}, which does not run here: {reason}; {remedy}"
            ) from None

    def fingerprint(self) -> str:
        """Return a hash of the tensors in the checkpoint's files: of their names, shapes and a sample of their bytes.

        The tensors of the loaded model cannot be hashed instead: some quantisation methods unpack or repack them,
        depending on the device, or at the first forward pass.
        """
        return fingerprint_weights(self._stored_tensors())

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the named tensors of the checkpoint's files, as integers with the same bytes."""
        adapter = self.folder / ADAPTER
        for file in [*weight_files(self.folder), *([adapter] if adapter.is_file() else [])]:
            with safe_open(file, framework="pt") as mapped:
                for name in mapped.keys():  # noqa: SIM118 (it is no mapping)
                    tensor = mapped.get_tensor(name)
                    yield name, tensor.view(INTEGERS[tensor.element_size()])


_CHECKPOINTS = WeakKeyDictionary[PreTrainedModel, QuantisedCheckpoint]()


def checkpoint_of(model: PreTrainedModel) -> QuantisedCheckpoint | None:
    """Return the quantised checkpoint that a model was loaded from; None for plain weights."""
    return _CHECKPOINTS.get(model)


def load_quantised(checkpoint: QuantisedCheckpoint, name: str, load: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Load a model with quantised weights, run the model on one token, and record its checkpoint for `checkpoint_of`.

    In the first forward pass some quantisation methods unpack the weights, and some raise errors for missing libraries.

    Args:
        load: loads the model from the checkpoint. Its errors are raised unchanged.

    Raises:
        SparsekvError: the model does not run on its device in its dtype.
        MemoryError, torch.OutOfMemoryError: memory ran out in the forward pass.
    """
    # Progress bars of compressed-tensors go to stderr, and no setting turns them off.
    with contextlib.redirect_stderr(io.StringIO()):
        model = load()
        try:
            _run_on_one_token(model)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model is a program and may raise anything
            own, dtype = (str(one).removeprefix("torch.") for one in (checkpoint.dtype, model.dtype))
            raise SparsekvError(
                f"model '{name}', quantised by {checkpoint.method}, does not run in {dtype} on {model.device}: "
                f"{first_line(error)}; {OTHER if dtype == own else f'use --dtype {own}'}"
            ) from None
    _CHECKPOINTS[model] = checkpoint
    return model


@torch.inference_mode()
def _run_on_one_token(model: PreTrainedModel) -> None:
    model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
