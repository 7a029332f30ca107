"""Tokens of a text that follows a stored prompt, as they are in the whole text.

A token of the whole conversation may span the end of the document and what follows it, and a text that goes on begins
otherwise than a text of its own. So the last tokens of a document that depend on what follows are held back, as text,
and are tokenised with it.
"""

from collections.abc import Sequence
from contextlib import suppress

from transformers import PreTrainedTokenizerBase

from sparsekv.formats.documents.plain_text import EncodedText, Trusted, encode_after, encode_text
from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.index.schema import Border, ChatFrame

BETWEEN = "\n\n"
"""Text between the document and a question, or a text that is appended."""
SAMPLES = (
    "a",
    "A",
    " a",
    "1",
    "\na",
    "\n\n\na",
    "\ta",
    "\r\n",
    "'s",
    ".",
    "(",
    "\u00e9",
    "\u0301",
    "\u4e2d",
    "\U0001f642",
)
"""Beginnings of a question: a token of the document that one of them changes is held back."""
_LEAD = 32
"""Tokens whose text is decoded to tokenise what follows behind it."""
_WINDOWS = (64, 256, 4096)
"""Characters at a text's end in which its last tokens are looked for."""


def find_border(
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    text: str,
    following: Sequence[Sequence[str]],
    *,
    special_tokens: bool = False,
) -> tuple[list[int], Border]:
    """The first token ids of a text that stay the same whatever follows, and the border behind them.

    Args:
        text: the end of the text, or all of it.
        following: samples of what may follow, in parts; none holds nothing back.
        special_tokens: special tokens in the text have a meaning.
    """
    for size in _WINDOWS:
        window = text[-size:]
        alone = encode_text(tokenizer, window, special_tokens=special_tokens).ids
        parts = [window if not special_tokens else Trusted(window)]
        stable = len(alone)
        for sample in following:
            with suppress(SparsekvError):  # the tokenizer cannot read this sample as plain text
                stable = min(stable, _same_start(alone, encode_text(tokenizer, *parts, *sample).ids))
        # Where the window begins, its tokens may differ from those of the text.
        differing = len(alone) - _same_start(alone[::-1], ids[::-1])
        for kept in range(stable, differing, -1):
            cut = _characters(tokenizer, window, alone[:kept], special_tokens=special_tokens)
            if cut is not None:
                return ids[: len(ids) - len(alone) + kept], Border(lead=window[:cut], held=window[cut:])
        if size >= len(text):
            break
    return ids, Border(lead=text[-_WINDOWS[0] :])


def border_behind(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Border:
    """The border behind tokens that stay as they are, such as an answer's: their text is known by decoding alone."""
    return Border(lead=str(tokenizer.decode(ids[-_LEAD:], clean_up_tokenization_spaces=False)))


def questions_after(chat: ChatFrame | None) -> list[list[str]]:
    """Samples of what a question puts behind a prompt; none without a frame, where its tokens stay its own."""
    if chat is None:
        return []
    return [[Trusted(chat.between), sample, Trusted(chat.after)] for sample in SAMPLES]


def encode_question(
    tokenizer: PreTrainedTokenizerBase,
    border: Border | None,
    chat: ChatFrame | None,
    question: str,
    *more: str,
    special_tokens: bool = False,
) -> list[int]:
    """Token ids [Q] of a question with what its frame puts around it, as they follow a stored prompt.

    Args:
        border: where the prompt ends; None for an index of an earlier version, whose questions are texts of their own.
        chat: the question's frame; None for the question alone.
        more: text behind the frame, with which the answer begins.

    Raises:
        SparsekvError: its special tokens cannot be read as plain text.
    """
    parts = [question, *more]
    if chat is not None:
        if chat.trimmed:
            question = question.rstrip() if chat.between == BETWEEN else question.strip()
        parts = [Trusted(chat.between), question, Trusted(chat.after), *more]
    return _behind(tokenizer, border, *parts, special_tokens=special_tokens).ids


def encode_more(
    tokenizer: PreTrainedTokenizerBase,
    border: Border | None,
    chat: ChatFrame | None,
    text: str,
    *,
    special_tokens: bool = False,
) -> tuple[EncodedText, ChatFrame | None, Border | None]:
    """Token ids of a text that is appended to a stored prompt, behind a blank line, with the frame and the border of
    the questions after it. Behind an answer it begins the next message, as a document does.

    Args:
        border, chat: those of the prompt.
        special_tokens: special tokens in the text keep their meaning; otherwise they are plain text.

    Raises:
        SparsekvError: its special tokens cannot be read as plain text.
    """
    between: str = BETWEEN
    if chat is not None and chat.between != BETWEEN:
        between, chat = Trusted(chat.between), chat.model_copy(update={"between": BETWEEN})
        text = text.lstrip() if chat.trimmed else text
    encoded = _behind(tokenizer, border, between, text, special_tokens=special_tokens)
    if border is None:
        return encoded, chat, None
    before = plain_end(tokenizer, between) if isinstance(between, Trusted) else f"{border.lead}{border.held}{between}"
    ids, end = find_border(tokenizer, encoded.ids, before + text, questions_after(chat), special_tokens=special_tokens)
    return EncodedText(ids, encoded.plain), chat, end


def plain_end(tokenizer: PreTrainedTokenizerBase, frame: str) -> str:
    """The text at the end of a frame, behind its last added token."""
    tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if str(token).strip()]
    return frame[max((frame.rfind(token) + len(token) for token in tokens if token in frame), default=0) :]


def _behind(
    tokenizer: PreTrainedTokenizerBase, border: Border | None, *parts: str, special_tokens: bool
) -> EncodedText:
    if border is None:
        return encode_text(tokenizer, *parts, special_tokens=special_tokens)
    return encode_after(tokenizer, border.lead, border.held, *parts, special_tokens=special_tokens)


def _same_start(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def _characters(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int], *, special_tokens: bool) -> int | None:
    """How many first characters of a text have these token ids; None where no number has them alone."""
    for end in range(len(text), -1, -1):
        found = encode_text(tokenizer, text[:end], special_tokens=special_tokens).ids
        if found == ids:
            return end
        if len(found) + 4 < len(ids):
            return None
    return None
