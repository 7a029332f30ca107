"""From a document to the fixed prompt: read it, frame it with the model's chat template, count its tokens."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.schema import ChatFrame

_DOCUMENT, _QUESTION = "<<sparsekv document>>", "<<sparsekv question>>"
_BETWEEN = "\n\n"


@dataclass(frozen=True)
class FixedPrompt:
    """input_ids [N] of everything before the question, the document's sha256, and the chat frame if there is one."""

    input_ids: torch.Tensor
    text_sha256: str
    chat: ChatFrame | None


def read_document(source: str) -> str:
    """Text of a file, or of standard input for `-`.

    Raises:
        UsageError: no such file, or a folder.
        SparsekvError: empty, or not UTF-8 text.
    """
    path = Path(source)
    if source != "-" and not path.exists():
        raise UsageError(f"no such file: {source}")
    if source != "-" and path.is_dir():
        raise UsageError(f"{source} is a folder; name a text file in it")
    try:
        data = sys.stdin.buffer.read() if source == "-" else path.read_bytes()
        text = data.decode()
    except OSError as error:
        raise SparsekvError(f"cannot read {source}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise SparsekvError(f"{source} is not text in UTF-8; convert it to plain text first") from None
    if "\0" in text:
        raise SparsekvError(f"{source} is not text: it contains zero bytes; convert it to plain text first")
    if not text.strip():
        raise SparsekvError(f"{source} is empty; give a document with text in it")
    return text


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> ChatFrame | None:
    """What the chat template puts before the document, between it and the question, and after; None without one."""
    if not tokenizer.chat_template:
        return None
    content = f"{_DOCUMENT}{_BETWEEN}{_QUESTION}"
    rendered = str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
    )
    parts = rendered.split(content)
    if len(parts) != 2:
        raise UsageError("the model's chat template does not carry the user's text through once; build with --raw")
    return ChatFrame(before=parts[0], between=_BETWEEN, after=parts[1])


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, *, raw: bool = False, max_tokens: int | None = None
) -> FixedPrompt:
    """Token ids of the fixed prompt: the chat template's head, then the document's first `max_tokens` tokens."""
    chat = None if raw else chat_frame(tokenizer)
    head = [] if chat is None else tokenizer(chat.before, add_special_tokens=False).input_ids
    document = tokenizer(text, add_special_tokens=chat is None, verbose=False).input_ids[:max_tokens]
    return FixedPrompt(torch.tensor([*head, *document]), hash_bytes(text.encode()), chat)
