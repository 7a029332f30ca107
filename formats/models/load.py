"""Load a model and its tokenizer, and compute their identity for the manifest."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, Field, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparsekv.formats.checksums import hash_file, hash_json
from sparsekv.formats.device import choose_device
from sparsekv.formats.errors import UsageError, check_choice, first_line
from sparsekv.formats.index.identity import fingerprint_weights, identify_model, identify_tokenizer
from sparsekv.formats.index.schema import Manifest, ModelIdentity, TokenizerIdentity, Weights
from sparsekv.formats.models.converted import silent_transformers
from sparsekv.formats.models.find import (
    EMBEDDED,
    Progress,
    find_model,
    local_folder,
)
from sparsekv.formats.models.kept import Kept, files_of
from sparsekv.formats.models.rope import RopeScaling
from sparsekv.formats.user.cache import cache_root

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers import PreTrainedTokenizerBase as Tokenizer


KINDS = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Extensions of the files from which tokenizers are loaded."""

OWN = "sha256.json"
"""Name of the file with checksums in a converted model's folder. It is not hashed with the tokenizer's files, because
it also has modification times, which differ in each copy of the folder."""

TEMPLATES = "additional_chat_templates"
"""The folder from which transformers reads a tokenizer's additional chat templates."""

MOST_TOKENIZER_BYTES = 64 << 20
"""Maximum total bytes of tokenizer files to hash. A folder with more has other large files with these extensions, and
hashing all of them would take longer than serialising the tokenizer."""

FORM = 1
"""Version of the code that loads tokenizers from files. Increase the version when that code changes."""

Look = list[tuple[str, int, int, int]]
"""Name, size in bytes, modification time in nanoseconds and inode of each file."""


class TokenizerFiles:
    """A snapshot of the tokenizer files in a model's folder, taken before the tokenizer is loaded from them."""

    def __init__(self, folder: Path):
        self._folder, self._seen = folder, _look(folder)

    def hash(self) -> str | None:
        """Return a sha256 of the files and of the versions of the libraries that read them.

        Call this method after the tokenizer is loaded, so that changed files are noticed.

        Returns:
            The hash. None if there are no files, a file cannot be read, the files have more than `MOST_TOKENIZER_BYTES`
            bytes in all, or a file has changed since the snapshot.
        """
        import tokenizers
        import transformers

        if self._seen is None or sum(size for _, size, _, _ in self._seen) > MOST_TOKENIZER_BYTES:
            return None
        try:
            found = {name: hash_file(self._folder / name) for name, *_ in self._seen}
        except OSError:
            return None
        if _look(self._folder) != self._seen:
            return None
        return hash_json([FORM, found, transformers.__version__, tokenizers.__version__])


def _look(folder: Path) -> Look | None:
    """Return the state of a folder's tokenizer files; None if there are none or the folder cannot be listed."""
    try:
        paths = [path for one in (folder, folder / TEMPLATES) if one.is_dir() for path in one.iterdir()]
        named = {str(path.relative_to(folder)): path.stat() for path in sorted(paths) if _counts(path)}
    except OSError:
        return None
    return [(name, found.st_size, found.st_mtime_ns, found.st_ino) for name, found in named.items()] or None


def _counts(path: Path) -> bool:
    return path.suffix in KINDS and path.name != OWN and path.is_file()


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

PLAIN_ATTENTION = (None, "eager", "sdpa")
"""Attention implementations that every machine has. Other implementations that a config may request, such as flash
attention, are not loaded, because this program's own attention replaces them."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode, its tokenizer and their origin.

    Attributes:
        name: name of the embedded model, hub id, or absolute path of a folder or a GGUF file.
        revision: commit of a hub model.
        tokenizer_files: hash of the files from which the tokenizer was loaded; None: unknown.
        weights: the precision to which the weights of linear layers were rounded; None: weights are not rounded.
        weights_hash: the result of `fingerprint_weights` before the rounding; None: weights are not rounded.
    """

    model: "PreTrainedModel"
    tokenizer: "Tokenizer"
    name: str
    revision: str | None
    tokenizer_files: str | None = None
    weights: Weights | None = None
    weights_hash: str | None = None


def load_model(
    name: str = EMBEDDED,
    *,
    device: str = "auto",
    dtype: str = "auto",
    rope_scaling: str | None = None,
    progress: Progress = lambda text: None,
    meanwhile: Callable[[torch.device, torch.dtype], None] = lambda device, dtype: None,
    ranks: int = 1,
) -> LoadedModel:
    """Load a model and its tokenizer, downloading missing files.

    Returns the model that `keep_model` has stored if there is one for these arguments and `ranks` is 1.

    Args:
        name: the embedded model's name, a local folder or GGUF file, or a hub id.
        device: `auto` (CUDA if there is one), `cpu`, `cuda` or `cuda:N`.
        dtype: a name in DTYPES, or `auto`: float32 on the CPU for plain weights; elsewhere, and for quantised weights,
            the checkpoint's dtype, or bfloat16 if the config has none.
        rope_scaling: `yarn:F` or `dynamic:F`, see `RopeScaling`.
        progress: called with one line at the start of each step that takes a while.
        meanwhile: called in another thread, with the device and the dtype, while weights are loaded to a GPU. It is not
            called for a CPU. Its exceptions are ignored.
        ranks: number of processes that each load a part of the model.

    Raises:
        UsageError: the model, device, dtype or scaling is unknown. Or the model has no tokenizer, is not a causal
            language model, needs a library that is missing, or cannot be scaled or divided among the ranks.
        SparsekvError: a download failed, or the weights are damaged, incomplete or larger than the device's memory.
        OSError: a file of weights cannot be opened, as without permission.
    """
    from sparsekv.formats.models.causal_model import causal_model, mapped_weights
    from sparsekv.formats.models.quantised import QuantisedCheckpoint, load_quantised

    scaling = None if rope_scaling is None else RopeScaling.parse(rope_scaling)
    target = choose_device(device)
    check_dtype(dtype)
    folder, name, revision = find_model(name, progress)
    how = name, revision, target, dtype, rope_scaling
    if ranks == 1 and (kept := _kept.take(folder, how)) is not None:
        return kept
    with silent_transformers(), ThreadPoolExecutor(1) as thread:
        files, config = TokenizerFiles(folder), _config(folder, name, scaling)
        quantised = QuantisedCheckpoint.of(folder, config)
        if quantised is not None:
            quantised.check(name, target)
        chosen = DTYPES.get(dtype) or (_auto_dtype(config, target) if quantised is None else quantised.dtype)
        if target.type == "cuda":
            thread.submit(meanwhile, target, chosen)
        # On a CPU the weights' pages are mapped while the tokenizer is loaded.
        mapped = mapped_weights(folder, config) if ranks == 1 and target.type == "cpu" else None
        tokenizer = _tokenizer(folder, name)
        hashed = thread.submit(files.hash)
        load = partial(causal_model, folder, name, config, target, chosen, ranks, mapped)
        model = load() if quantised is None else load_quantised(quantised, name, load)
        return LoadedModel(model, tokenizer, name, revision, hashed.result())


_kept = Kept[LoadedModel]()


def keep_model(name: str, dtype: str, rope_scaling: str | None) -> LoadedModel:
    """Load a model that is on this machine, on the CPU, and store it in memory.

    `load_model` then returns this model for the same arguments on the CPU, in this process and in its forks, while the
    model's files are unchanged.

    Raises the errors of `load_model`, and UsageError if the model is not on this machine.
    """
    target, folder = torch.device("cpu"), local_folder(name)
    files = files_of(folder)
    loaded = load_model(name, device="cpu", dtype=dtype, rope_scaling=rope_scaling)
    _kept.keep(folder, (loaded.name, loaded.revision, target, dtype, rope_scaling), files, loaded)
    return loaded


def kept_models() -> "list[PreTrainedModel]":
    """Return the models that `keep_model` has stored in memory."""
    return [loaded.model for loaded in _kept.everything()]


def load_tokenizer(name: str) -> "Tokenizer":
    """Load only the tokenizer of a model that is on this machine, without a download.

    Raises:
        UsageError: the model is not on this machine, or has no tokenizer.
        SparsekvError: the embedded model is not in the cache.
    """
    folder = local_folder(name)
    with silent_transformers():
        return _tokenizer(folder, name)


def load_description(name: str, rope_scaling: str | None, progress: Progress) -> "tuple[PreTrainedConfig, Tokenizer]":
    """Load the config and the tokenizer of a model that is on this machine, without its weights.

    Calls `progress` with one line before a GGUF file is converted.

    Raises the errors of `load_tokenizer`, and UsageError for a config that `load_model` would refuse.
    """
    folder = local_folder(name, progress)
    with silent_transformers():
        config = _config(folder, name, None if rope_scaling is None else RopeScaling.parse(rope_scaling))
        return config, _tokenizer(folder, name)


def check_dtype(dtype: str) -> None:
    """Raise UsageError for an unknown dtype."""
    check_choice("--dtype", dtype, ("auto", *DTYPES))


def _auto_dtype(config: "PreTrainedConfig", device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    own = config.dtype or config.get_text_config().dtype
    return own if isinstance(own, torch.dtype) else torch.bfloat16


def _config(folder: Path, name: str, scaling: RopeScaling | None) -> "PreTrainedConfig":
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils.import_utils import is_peft_available

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        # The first line of a validator's error names only the validator, not the fault.
        reason = first_line(error.__cause__ or error if isinstance(error, StrictDataclassError) else error)
        if "trust_remote_code" in str(error):
            reason = "it brings code of its own, which is not run"
        raise UsageError(f"model '{name}' has a config that cannot be read: {reason}; choose another model") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(
            f"model '{name}' ({config.model_type}) is not a causal language model; choose one that generates text"
        )
    if has_encoder(config):
        raise UsageError(f"model '{name}' ({config.model_type}) {ENCODER_DECODER}")
    if (folder / "adapter_config.json").exists() and not is_peft_available():  # transformers would ignore the adapter
        raise UsageError(
            f"model '{name}' has an adapter, which needs peft: install peft, or merge the adapter into the weights"
        )
    if scaling is not None:
        scaling.stretch(config)
    if any(one._attn_implementation not in PLAIN_ATTENTION for one in (config, config.get_text_config())):
        config._attn_implementation = None
    return config


ENCODER_DECODER = "is an encoder-decoder model, and only models without an encoder can be indexed: choose another model"


def has_encoder(config: "PreTrainedConfig") -> bool:
    """Whether a config's class belongs to an encoder-decoder model, of which transformers can load the decoder alone.

    The class is asked because the config of a lone decoder may say that it has no encoder.
    """
    return bool(getattr(type(config), "is_encoder_decoder", False))


def _tokenizer(folder: Path, name: str) -> "Tokenizer":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers import PreTrainedTokenizerBase as Tokenizer

    # PreTrainedTokenizerFast reads a converted model's tokenizer unchanged. For some architectures, such as Qwen 2,
    # AutoTokenizer would keep only the vocabulary and replace the rest by the architecture's usual tokenizer.
    converted = folder.is_relative_to(cache_root() / "models")
    kind: Any = PreTrainedTokenizerFast if converted else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, ImportError):
        tokenizer = None
    # For a folder without tokenizer files, transformers may return a tokenizer with special tokens only.
    if not isinstance(tokenizer, Tokenizer) or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UsageError(
            f"model '{name}' has no tokenizer that can be read; put the tokenizer's files (tokenizer.json) "
            "into the folder of config.json"
        )
    return tokenizer


def identify(loaded: LoadedModel, index: Manifest | None = None) -> tuple[ModelIdentity, TokenizerIdentity]:
    """Return the identities of a model (config and weights) and of its tokenizer (with chat template), with hashes.

    Args:
        index: manifest of an index. If the index's tokenizer was loaded from the same files, the index's tokenizer
            identity is returned. Serialising the tokenizer would take ten times as long as hashing its files, and would
            hold Python's global lock.
    """
    from sparsekv.formats.models.quantised import checkpoint_of

    model, config = loaded.model, loaded.model.config.get_text_config().to_dict()
    adapters, checkpoint = getattr(model, "peft_config", None), checkpoint_of(model)
    if checkpoint is None:
        fingerprint = loaded.weights_hash or fingerprint_weights(model.state_dict().items())
    else:
        fingerprint, config["quantization_config"] = checkpoint.fingerprint(), checkpoint.settings
    adapter = ",".join(_named_adapter(*adapter) for adapter in sorted(adapters.items())) if adapters else None
    model_identity = identify_model(loaded.name, loaded.revision, config, fingerprint, adapter, loaded.weights)
    if index is not None and loaded.tokenizer_files is not None and index.tokenizer_files == loaded.tokenizer_files:
        return model_identity, index.tokenizer
    return model_identity, tokenizer_identity(loaded.tokenizer)


OF_NO_EFFECT = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type")
"""Settings of an adapter that do not change the keys, values and logits of the model with the adapter."""


def _named_adapter(name: str, settings: Any) -> str:
    """Return an adapter's name and a short hash of its settings, such as LoRA's alpha, which weights do not show.

    Settings that have their default are left out, because a later version of peft may have more settings.
    """
    other = {
        one.name: _plain(value)
        for one in fields(settings)
        if one.name not in OF_NO_EFFECT and (value := getattr(settings, one.name)) != _default(one)
    }
    return f"{name} {hash_json(other)[:12]}"


def _default(setting: "Field[Any]") -> Any:
    return setting.default if setting.default_factory is MISSING else setting.default_factory()


def _plain(value: Any) -> Any:
    """Convert a setting to a value that JSON has; the elements of a set are sorted."""
    if isinstance(value, set):
        return sorted(value)
    return value if isinstance(value, dict | list | float | int) else str(value)


def tokenizer_identity(tokenizer: "PreTrainedTokenizerBase") -> TokenizerIdentity:
    """Return the identity of a tokenizer, with hashes of the tokenizer, its chat template and its special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    serialized = _serialised(backend) if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    template, special = tokenizer.chat_template, dict(tokenizer.special_tokens_map)
    if getattr(tokenizer, "split_special_tokens", False):  # special tokens in texts are then encoded as plain text
        special["split_special_tokens"] = "true"
    return identify_tokenizer(serialized, template if template is None else str(template), special)


def _serialised(backend: Any) -> str:
    """Return a tokenizer's own serialisation, without truncation and padding.

    A tokenizer's file may turn both on. transformers turns them off in the tokenizer when it encodes a first text.
    """
    if backend.truncation is not None or backend.padding is not None:
        backend = type(backend).from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    serialised: str = backend.to_str()
    return serialised
