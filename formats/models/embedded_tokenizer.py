"""The embedded model's tokenizer, built from the vocabulary and merges in its GGUF file.

transformers has its own conversion of GGUF files. That conversion does not split numbers into digits, as this family
of models does, and its special tokens change between releases. An index is bound to its tokenizer, so this tokenizer
has to be the same everywhere.
"""

from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

CONTROL = 3  # the token type of special tokens in GGUF


def build_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer that splits digits, with the GGUF file's special tokens and chat template."""
    reader = GGUFReader(gguf)
    tokens = _strings(reader, "tokens")
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _strings(reader, "merges"))]
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    types = _numbers(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    named = {
        f"{short}_token": tokens[_numbers(reader, f"tokenizer.ggml.{long}_token_id")[0]]
        for short, long in names.items()
    }
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)
    fast.chat_template = _text(reader.fields["tokenizer.chat_template"], -1)
    return fast


def _strings(reader: GGUFReader, name: str) -> list[str]:
    field = reader.fields[f"tokenizer.ggml.{name}"]
    return [_text(field, part) for part in field.data]


def _text(field: Any, part: int) -> str:
    return bytes(field.parts[part]).decode()


def _numbers(reader: GGUFReader, name: str) -> list[int]:
    field = reader.fields[name]
    return [int(field.parts[part][0]) for part in field.data]
