"""From a document to the token ids of the fixed prompt, inside the model's chat template."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedTokenizerBase

from sparsekv.formats.documents.document import Document
from sparsekv.formats.documents.plain_text import EncodedText, Trusted, added_ends, encode_text
from sparsekv.formats.errors import UsageError
from sparsekv.formats.models.hub import first_line
from sparsekv.formats.schema import ChatFrame

_DOCUMENT, _QUESTION = "<<sparsekv document>>", "<<sparsekv question>>"
_BETWEEN = "\n\n"


@dataclass(frozen=True)
class FixedPrompt:
    """input_ids [N] of everything before the question, the document's sha256, and the chat frame if there is one.

    `special_tokens`: special tokens in the document kept their meaning. `plain`: those that were read as plain text,
    with their counts. `cut`: how many tokens of the document are in the prompt, where it goes on; None: all.
    """

    input_ids: torch.Tensor
    text_sha256: str
    chat: ChatFrame | None
    special_tokens: bool = False
    plain: dict[str, int] = field(default_factory=dict)
    cut: int | None = None


def chat_frame(tokenizer: PreTrainedTokenizerBase, before: str | None = None) -> ChatFrame | None:
    """What the chat template puts before the document, between it and the question, and after; None without one.

    Args:
        before: the text before the document, if not the template's: one with the date in it gives another every day.

    Raises:
        UsageError: the template fails, or its output does not contain the user's text exactly once.
    """
    if not tokenizer.chat_template:
        return None
    content = f"{_DOCUMENT}{_BETWEEN}{_QUESTION}"
    parts = render(tokenizer, [{"role": "user", "content": content}]).split(content)
    if len(parts) != 2:
        raise UsageError("the model's chat template does not carry the user's text through once; build with --raw")
    return ChatFrame(before=parts[0] if before is None else before, between=_BETWEEN, after=parts[1])


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Messages in a model's chat template, up to where its answer begins; UsageError if the template fails."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program and may raise anything
        raise UsageError(f"the model's chat template fails: {first_line(error)}; build with --raw") from None


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    text: str | Document,
    *,
    raw: bool = False,
    before: str | None = None,
    max_tokens: int | None = None,
    special_tokens: bool = False,
) -> FixedPrompt:
    """Token ids of the fixed prompt: the chat template's head, then the document's first `max_tokens` tokens.

    Args:
        text: of a `Document`, only as much is kept in memory as these tokens need.
        before: as of `chat_frame`.
        special_tokens: special tokens in the document keep their meaning; otherwise they are plain text.

    Raises:
        UsageError: the model's chat template cannot be used.
        SparsekvError: the document is not text, or its special tokens cannot be read as plain text.
    """
    chat = None if raw else chat_frame(tokenizer, before)
    head = [] if chat is None else encode_text(tokenizer, Trusted(chat.before)).ids
    document = Document.of(text) if isinstance(text, str) else text

    # A question follows, so that the text is not to be ended.
    ending = [] if chat is not None else added_ends(tokenizer)[1]

    def encode(part: str) -> EncodedText:
        found = encode_text(tokenizer, part, add_special_tokens=chat is None, special_tokens=special_tokens)
        ended = ending and found.ids[-len(ending) :] == ending
        return replace(found, ids=found.ids[: -len(ending)]) if ended else found

    encoded, cut = (encode(document.whole()), False) if max_tokens is None else _first(encode, document, max_tokens)
    plain = encoded.plain
    if cut and plain:
        kept = str(tokenizer.decode(encoded.ids))
        plain = {token: kept.count(token) for token in plain if token in kept}
    held = len(encoded.ids) if cut else None
    return FixedPrompt(torch.tensor([*head, *encoded.ids]), document.sha256(), chat, special_tokens, plain, held)


def _first(encode: Callable[[str], EncodedText], document: Document, tokens: int) -> tuple[EncodedText, bool]:
    """The first tokens of a document, and whether it goes on.

    A beginning may be cut inside a token, so its tokens are accepted only when a beginning twice as long has the same.
    """
    shorter: list[int] = []
    characters = 8 * tokens + 4096
    while True:
        text = document.first(characters)
        encoded = encode(text)
        ids = encoded.ids[:tokens]
        if len(text) < characters:
            return EncodedText(ids, encoded.plain), len(encoded.ids) > tokens
        if len(ids) == tokens and ids == shorter:
            return EncodedText(ids, encoded.plain), True
        shorter, characters = ids, 2 * characters
