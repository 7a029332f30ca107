"""Convert GGUF files. The cache has a folder for each converted file, with weights in float32 and a tokenizer."""

import contextlib
import io
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors import SafetensorError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sparsekv.formats.errors import SparsekvError, UsageError, first_line
from sparsekv.formats.index.folder import sync_path
from sparsekv.formats.models.converted import clear, seal, silent_transformers, whole_folder
from sparsekv.formats.models.gguf_folders import folder_of

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Token types in GGUF: merged tokens, special tokens, and added tokens of plain text."""

KINDS = {"gpt2": "byte-level BPE", "llama": "SentencePiece"}
"""Kinds of tokenizers that can be read, as GGUF files name them and as users know them."""

GEMMAS = ("gemma", "gemma2", "gemma3")
"""Architectures with Gemma's SentencePiece tokenizer: token ids, not scores, give the order of merges."""

KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 that keep white space after them. Its other special tokens, such as `<|user|>`, take it in,
which GGUF files do not say. llama.cpp has the same list."""

BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
AS_GPT2 = ("gpt-2", "phi-2", "olmo", "mpt")
AS_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3")
AS_QWEN2 = ("qwen2", "deepseek-r1-qwen", "stablelm2")
"""Names of pre-tokenizers in GGUF files, as llama.cpp writes them. All names of a group split text in the same way
before byte pairs are merged."""

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""Regular expression by which Llama 3 and Qwen 2 split text. They differ in the pattern for digits (`numbers`)."""

SPACE = "\u2581"
"""The character for a space in SentencePiece's tokens."""

UNREADABLE = (OSError, LookupError, TypeError, ValueError, RuntimeError, ImportError, AttributeError, SafetensorError)


def gguf_folder(path: Path, name: str, progress: Callable[[str], None]) -> Path:
    """Return the folder of a GGUF file's converted model. If it is missing or damaged, the file is converted first.

    Several processes may call this function at the same time: one converts the file, and the others wait.

    Args:
        name: the model's name as the user gave it, for errors.
        progress: called with one line before a conversion.

    Raises:
        UsageError: the file is no GGUF file, or has content that cannot be converted correctly.
        SparsekvError: disk space, memory or permission is missing.
    """
    return whole_folder(folder_of(path, name), lambda folder, damaged: _make(path, name, folder, progress))


def _make(path: Path, name: str, folder: Path, progress: Callable[[str], None]) -> None:
    """Convert a GGUF file and move the result to `folder`, whose lock the caller must hold. Raises as `gguf_folder`."""
    try:
        reader = GGUFReader(path)
    except UNREADABLE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UsageError(
            f"model '{name}' cannot be read as a GGUF file: it is cut off, damaged or of another kind; get it again"
        ) from None
    with _read_errors(name):
        bytes_needed = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    free = shutil.disk_usage(folder.parent).free
    if free < bytes_needed:
        raise SparsekvError(
            f"not enough space for model '{name}' in {folder.parent}: {bytes_needed >> 20} MiB needed, "
            f"{free >> 20} MiB free; free space or set SPARSEKV_CACHE to another folder"
        )
    with _read_errors(name):
        inside = _tokenizer_found(reader)
    progress(f"converting {path.name} into {folder} ({bytes_needed >> 20} MiB in float32, once), with its {inside}")
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    clear(unfinished)  # a process that was killed may have left this folder
    try:
        with _read_errors(name):
            convert(path, unfinished, reader)
        seal(unfinished)
        clear(folder)
        unfinished.rename(folder)
        sync_path(folder.parent)
    finally:
        clear(unfinished)


@contextlib.contextmanager
def _read_errors(name: str) -> Iterator[None]:
    """Within the context, convert errors of reading a GGUF file to a UsageError, and lack of memory to a SparsekvError.

    A UsageError gets the model's name before its message. Errors of the operating system, such as a full disk, are
    raised unchanged.
    """
    try:
        yield
    except UsageError as error:
        raise UsageError(f"model '{name}' {error}") from None
    except MemoryError:
        raise SparsekvError(f"not enough memory to convert model '{name}'; free some, or use a smaller model") from None
    except UNREADABLE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UsageError(
            f"model '{name}' cannot be read as a GGUF file: {first_line(error)}; name a whole one, of an architecture "
            "that transformers reads"
        ) from None


def convert(path: Path, folder: Path, reader: GGUFReader | None = None) -> None:
    """Save a GGUF file's model to a folder, with weights dequantised to float32, its tokenizer and its EOS tokens.

    Allocates the weights twice.

    Raises:
        UsageError: the file is one of several parts, transformers' reader would ignore a part of it, or its tokenizer
            is missing or unknown.
    """
    reader = reader or GGUFReader(path)
    if int(_one(reader, "split.count", 1)) > 1:
        raise UsageError("is one of several parts of a GGUF file; join them with llama-gguf-split --merge")
    tokenizer = build_tokenizer(reader)
    # The GGUF reader prints a progress bar that no setting turns off.
    with silent_transformers(), contextlib.redirect_stderr(io.StringIO()):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True
        )
        read, found = loaded
        check_config(reader, read.config)
        check_tensors(reader, read, found["missing_keys"])
        settings = read.config.to_dict()
        # transformers marks the model as quantised, although its weights are float32 now, and refuses to save it. Its
        # config would make transformers look for the GGUF file when the saved folder is loaded.
        for one in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            settings.pop(one, None)
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(read.config)]
        model = kind(type(read.config)(**settings))
        model.load_state_dict(read.state_dict())
        ends = [_one(reader, f"tokenizer.ggml.{kind}_token_id", None) for kind in ("bos", "eos", "padding", "eot")]
        bos, eos, pad, turn = (None if one is None else int(one) for one in ends)
        both = sorted({one for one in (eos, turn) if one is not None})
        model.generation_config = GenerationConfig(
            bos_token_id=bos, eos_token_id=both[0] if len(both) == 1 else both or None, pad_token_id=pad
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


CHECKED = {
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "context_length": ("max_position_embeddings",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
}
"""Settings that determine a model's attention or logits: the key in GGUF files after the architecture's name, and the
names in transformers' configs."""


def check_config(reader: GGUFReader, config: PreTrainedConfig) -> None:
    """Raise UsageError if the config that transformers read from a GGUF file differs from it in an important setting.

    A setting is important if it changes the model's attention or logits. Transformers' reader ignores unknown keys.
    """
    kind = str(_one(reader, "general.architecture", ""))
    for key, known in CHECKED.items():
        wanted = _one(reader, f"{kind}.{key}", None)
        found = next((value for name in known if (value := getattr(config, name, None)) is not None), None)
        if key == "attention.key_length" and found is None:
            found = config.hidden_size // config.num_attention_heads
        if wanted is not None and (found is None or abs(float(found) - float(wanted)) > 1e-6 * abs(float(wanted))):
            raise UsageError(
                f"has {kind}.{key} = {wanted}, which transformers reads as {found}; use the model's original checkpoint"
            )
    scalar, channels = getattr(config, "query_pre_attn_scalar", None), getattr(config, "head_dim", None)
    # GGUF files have no key for this scalar, and the default of transformers' config may be wrong for the model.
    if scalar != channels and scalar is not None:
        raise UsageError(
            f"has heads of {channels} channels, whose logits transformers would scale as those of {scalar} channels; "
            "use the model's original checkpoint"
        )
    if not _one(reader, f"{kind}.attention.causal", True):
        raise UsageError("lets tokens attend to later tokens; choose a model that generates text")
    rope = getattr(config, "rope_parameters", None) or {}
    # A factor without a type means linear scaling, as in llama.cpp.
    factor = _one(reader, f"{kind}.rope.scaling.factor", _one(reader, f"{kind}.rope.scale_linear", 1.0))
    scaling = str(_one(reader, f"{kind}.rope.scaling.type", "linear" if factor not in (0, 1) else "none"))
    for key, layers in (("rope.freq_base", "full_attention"), ("rope.freq_base_swa", "sliding_attention")):
        base, of_layers = _one(reader, f"{kind}.{key}", None), rope.get(layers) or rope
        theta = of_layers.get("rope_theta", getattr(config, "rope_theta", None))
        if base is not None and theta is not None and abs(float(theta) - float(base)) > 1e-3 * abs(float(base)):
            raise UsageError(
                f"has {kind}.{key} = {base}, which transformers reads as {theta}; use the model's original checkpoint"
            )
    _check_windows(reader, f"{kind}.attention.sliding_window_pattern", config)
    rotated, rotates = _one(reader, f"{kind}.rope.dimension_count", None), _rotated(config)
    if rotated is not None and int(rotated) != rotates:
        raise UsageError(
            f"has {kind}.rope.dimension_count = {rotated}, which transformers reads as {rotates}; use the model's "
            "original checkpoint"
        )
    factors = any(tensor.name.startswith("rope_f") for tensor in reader.tensors)
    if (factors or scaling != "none") and rope.get("rope_type", "default") == "default":
        raise UsageError(
            "scales its positions (RoPE), which transformers' reader of GGUF files ignores; use the model's "
            "original checkpoint"
        )


def _check_windows(reader: GGUFReader, key: str, config: PreTrainedConfig) -> None:
    """Raise UsageError if a config gives other layers a sliding window than the GGUF file.

    The file has a truth value for each layer, or a number: every layer of this number attends to all tokens.
    """
    field = reader.fields.get(key)
    if field is None:
        return
    pattern, layers = field.contents(), range(config.num_hidden_layers)
    wanted = pattern if isinstance(pattern, list) else [pattern == 0 or one % pattern < pattern - 1 for one in layers]
    types = getattr(config, "layer_types", None) or []
    found = [one == "sliding_attention" for one in types] or [bool(getattr(config, "sliding_window", None))] * len(
        layers
    )
    if [*map(bool, wanted)] != found:
        raise UsageError(
            f"has {key} = {pattern}, and transformers gives other layers a window; use the model's original checkpoint"
        )


def _rotated(config: PreTrainedConfig) -> int:
    """Return the number of channels of a head to which a model applies RoPE."""
    channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return int(channels * rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0)))


def check_tensors(reader: GGUFReader, model: PreTrainedModel, missing: Collection[str]) -> None:
    """Raise UsageError if a GGUF file lacks weights of the model, or if transformers ignored some of its values.

    Transformers' reader fills missing weights with random numbers, and ignores tensors that the architecture does not
    have, such as a bias.

    Args:
        missing: names of the weights that transformers has not found in the file.
    """
    if missing:
        raise UsageError(
            f"lacks {len(missing)} weights of its architecture (the first: {min(missing)}); use the model's original "
            "checkpoint"
        )
    # RoPE's factors are not weights (see `check_config`). An output layer that is tied to the embedding is not counted.
    tied = model.config.tie_word_embeddings
    kept = [one for one in reader.tensors if not one.name.startswith("rope_f")]
    stored = sum(int(one.n_elements) for one in kept if not (tied and one.name == "output.weight"))
    read = sum({one.data_ptr(): one.numel() for one in model.state_dict().values()}.values())
    if stored != read:
        raise UsageError(
            f"has {stored:,} values in its tensors, of which transformers reads {read:,}; use the model's original "
            "checkpoint"
        )


def build_tokenizer(reader: GGUFReader) -> PreTrainedTokenizerBase:
    """Build the tokenizer of a GGUF file, with its special tokens and chat template.

    The tokenizer is built here, because transformers' conversion splits numbers wrongly for some model families,
    ignores a file's setting to put no space before a text, and changes between releases. Version 5.17 makes a tokenizer
    for Gemma that splits most words wrongly. An index is bound to its tokenizer, so the tokenizer must be the same on
    every machine.

    Raises:
        UsageError: the file has no tokenizer, or one whose kind or way of splitting text is unknown.
    """
    _tokenizer_found(reader)
    kind, template = _one(reader, "tokenizer.ggml.model", None), _one(reader, "tokenizer.chat_template", None)
    tokens, pre = _strings(reader, "tokens"), str(_one(reader, "tokenizer.ggml.pre", ""))
    types = _numbers(reader, "tokenizer.ggml.token_type")
    is_gemma = kind == "llama" and _one(reader, "general.architecture", "") in GEMMAS
    if is_gemma:
        tokens = [SPACE * len(one) if one and not one.strip(" ") else one for one in tokens]
        tokenizer = _gemma(reader, tokens)
    else:
        tokenizer = _sentencepiece(reader, tokens, types) if kind == "llama" else _byte_level(reader, tokens, pre)
    # Gemma's runs of spaces are merged from spaces, and are no added tokens.
    added = [
        (one, kind)
        for one, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED) and not (is_gemma and one.startswith(SPACE))
    ]
    strips = kind == "llama" and _one(reader, "general.architecture", "") == "phi3"
    tokenizer.add_special_tokens(
        [
            AddedToken(one, special=True, normalized=False, rstrip=strips and one not in KEEP_SPACE)
            for one, kind in added
            if kind == CONTROL
        ]
    )
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one, kind in added if kind != CONTROL])
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    numbers = {short: _one(reader, f"tokenizer.ggml.{long}_token_id", None) for short, long in names.items()}
    named = {f"{short}_token": tokens[int(number)] for short, number in numbers.items() if number is not None}
    if "bos_token" in named and _one(reader, "tokenizer.ggml.add_bos_token", kind == "llama" or pre in AS_LLAMA3):
        first = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, int(numbers["bos"]))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)
    fast.chat_template = template
    return fast


def _tokenizer_found(reader: GGUFReader) -> str:
    """Return a description of a file's tokenizer and chat template. Raises UsageError for an unsupported tokenizer."""
    kind = _one(reader, "tokenizer.ggml.model", None)
    if kind is None or "tokenizer.ggml.tokens" not in reader.fields:
        raise UsageError("has no tokenizer; use the model's original checkpoint")
    if kind not in KINDS:
        raise UsageError(f"has a tokenizer of kind {kind}, which is not supported; use the model's original checkpoint")
    size = len(reader.fields["tokenizer.ggml.tokens"].data)
    template = "chat template" if "tokenizer.chat_template" in reader.fields else "no chat template"
    return f"tokenizer ({KINDS[kind]}, {size:,} tokens) and {template}"


def _byte_level(reader: GGUFReader, tokens: list[str], pre: str) -> Tokenizer:
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _strings(reader, "merges"))]
    model = BPE({token: number for number, token in enumerate(tokens)}, merges, ignore_merges=pre in AS_LLAMA3)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(reader: GGUFReader, tokens: list[str], types: list[int]) -> Tokenizer:
    """Build SentencePiece's BPE. Pairs with the highest score are merged first. Unknown letters become byte tokens."""
    scores = _numbers(reader, "tokenizer.ggml.scores")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    merges = []
    for token in sorted(normal, key=lambda token: (-scores[vocabulary[token]], vocabulary[token])):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        found = [pair for pair in cuts if normal.issuperset(pair)]
        merges += sorted(found, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    unknown = tokens[int(_one(reader, "tokenizer.ggml.unknown_token_id", 0))]
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    lead, spaces = bool(_one(reader, "tokenizer.ggml.add_space_prefix", True)), normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if lead else spaces
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if lead else back)
    return tokenizer


def _gemma(reader: GGUFReader, tokens: list[str]) -> Tokenizer:
    """Build Gemma's BPE. Pairs that make the token with the lowest id are merged first, those with a long left part."""
    vocabulary, merges = {token: number for number, token in enumerate(tokens)}, []
    for token in tokens:
        cuts = ((token[:cut], token[cut:]) for cut in range(len(token) - 1, 0, -1))
        merges += [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
    unknown = tokens[int(_one(reader, "tokenizer.ggml.unknown_token_id", 0))]
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer (it splits text before merges) of a name in GGUF. Raises UsageError if unknown."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in AS_GPT2:
        return whole
    if pre in BY_DIGIT:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    if pre not in (*AS_LLAMA3, *AS_QWEN2):
        raise UsageError(f"has the pre-tokenizer '{pre}', which is not supported; use the model's original checkpoint")
    pattern = Regex(WORDS.format(numbers=r"\p{N}{1,3}" if pre in AS_LLAMA3 else r"\p{N}"))
    split = pre_tokenizers.Split(pattern, "isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _one(reader: GGUFReader, name: str, default: Any) -> Any:
    """Return the value of a key, or the default if the file lacks the key; for an array of numbers, the largest."""
    field = reader.fields.get(name)
    if field is None:
        return default
    value = field.contents()
    return max(value) if isinstance(value, list) and value else value


def _strings(reader: GGUFReader, name: str) -> list[str]:
    field = reader.fields[f"tokenizer.ggml.{name}"]
    return [bytes(field.parts[part]).decode() for part in field.data]


def _numbers(reader: GGUFReader, name: str) -> list[Any]:
    field = reader.fields[name]
    return [field.parts[part][0].item() for part in field.data]
