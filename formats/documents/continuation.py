"""Tokenise text that follows a stored prompt as it would be tokenised within the whole text.

A token of the whole conversation may span the end of the document and the following text. A continued text may also
begin with other tokens than a separate text. So the document's last tokens that depend on the following text are held
back as text, and are tokenised together with it.
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
"""Sample beginnings of a question. Document tokens that change if one of these texts follows are held back."""
_LEAD = 32
"""Number of a prompt's last tokens from which `border_behind` decodes the border's `lead`."""
_WINDOWS = (64, 256, 4096)
"""Sizes, in characters, of the ends of a text that are tokenised one after another to find where to split the text."""


def find_border(
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    text: str,
    following: Sequence[Sequence[str]],
    *,
    special_tokens: bool = False,
) -> tuple[list[int], Border]:
    """Split a text's token ids: return the leading ids that no sample of following text changes, and the border there.

    The border's `held` is the text after these ids, which is tokenised together with the following text. The border's
    `lead` is the end of the text before `held`. All ids are returned if the text cannot be split within its last 4,096
    characters.

    Args:
        ids: the token ids of the text.
        text: the whole text, or its end.
        following: samples of following text, each in parts; empty: no token depends on the following text.
        special_tokens: special tokens in the text keep their meaning.
    """
    for size in _WINDOWS:
        window = text[-size:]
        alone = encode_text(tokenizer, window, special_tokens=special_tokens).ids
        parts = [window if not special_tokens else Trusted(window)]
        stable = len(alone)
        for sample in following:
            with suppress(SparsekvError):  # the tokenizer cannot read this sample as plain text
                stable = min(stable, common_prefix(alone, encode_text(tokenizer, *parts, *sample).ids))
        # At the window's beginning, its tokens may differ from those of the whole text.
        differing = len(alone) - common_prefix(alone[::-1], ids[::-1])
        for kept in range(stable, differing, -1):
            cut = _characters(tokenizer, window, alone[:kept], special_tokens=special_tokens)
            if cut is not None:
                return ids[: len(ids) - len(alone) + kept], Border(lead=window[:cut], held=window[cut:])
        if size >= len(text):
            break
    return ids, Border(lead=text[-_WINDOWS[0] :])


def border_behind(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Border:
    """Make the border after token ids that never change, such as an answer's. The border's text is decoded from ids."""
    return Border(lead=str(tokenizer.decode(ids[-_LEAD:], clean_up_tokenization_spaces=False)))


def questions_after(chat: ChatFrame | None) -> list[list[str]]:
    """Return samples of the text that a question appends to a prompt; none without a chat frame."""
    if chat is None:
        return []
    return [[Trusted(chat.between), sample, Trusted(chat.after)] for sample in SAMPLES]


def encode_question(
    tokenizer: PreTrainedTokenizerBase,
    border: Border | None,
    chat: ChatFrame | None,
    question: str,
    *answer_start: str,
    special_tokens: bool = False,
) -> list[int]:
    """Tokenise a question with its chat frame, as it follows a stored prompt; return token ids [Q].

    Args:
        border: the end of the prompt; None for an index of an earlier version, whose questions are tokenised alone.
        chat: the chat template's texts around the question; None for the question alone.
        answer_start: text with which the answer begins; it follows the question and the frame.

    Raises:
        SparsekvError: the special tokens of the question cannot be read as plain text.
    """
    parts = [question, *answer_start]
    if chat is not None:
        if chat.trimmed:
            question = question.rstrip() if chat.between == BETWEEN else question.strip()
        parts = [Trusted(chat.between), question, Trusted(chat.after), *answer_start]
    return _behind(tokenizer, border, *parts, special_tokens=special_tokens).ids


def encode_more(
    tokenizer: PreTrainedTokenizerBase,
    border: Border | None,
    chat: ChatFrame | None,
    text: str,
    *,
    special_tokens: bool = False,
) -> tuple[EncodedText, ChatFrame | None, Border | None, int]:
    """Tokenise a text that is appended to a stored prompt: after a blank line, or after an answer as the next message.

    Before the next message comes the chat template's text between an answer and a question.

    Args:
        border: the end of the stored prompt, on which the text's first tokens depend.
        chat: the chat template's texts around document and question.
        special_tokens: special tokens in the text keep their meaning; otherwise they are plain text.

    Returns:
        The token ids without those of the new border's `held`; the chat frame of later questions; the border of later
        questions, which is None if `border` is None; and the result of `line_of_first_token` for the text.

    Raises:
        SparsekvError: the special tokens of the text cannot be read as plain text.
    """
    between: str = BETWEEN
    if chat is not None and chat.between != BETWEEN:
        between, chat = Trusted(chat.between), chat.model_copy(update={"between": BETWEEN})
    shown = text.lstrip() if isinstance(between, Trusted) and chat is not None and chat.trimmed else text
    encoded = _behind(tokenizer, border, between, shown, special_tokens=special_tokens)
    held = "" if border is None else border.held
    preceding = encode_text(tokenizer, held, between, special_tokens=special_tokens).ids
    line = line_of_first_token(tokenizer, encoded.ids, preceding, text)
    if border is None:
        return encoded, chat, None, line
    before = plain_end(tokenizer, between) if isinstance(between, Trusted) else f"{border.lead}{border.held}{between}"
    ids, end = find_border(tokenizer, encoded.ids, before + shown, questions_after(chat), special_tokens=special_tokens)
    return EncodedText(ids, encoded.plain), chat, end, line


def line_of_first_token(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], before: Sequence[int], text: str
) -> int:
    """Return the line of a text, counted from 1, at which the first of the given tokens begins.

    The tokens begin with a preceding text, such as a chat template's. Line breaks of the preceding text count back from
    line 1, to 0 or less. A template may have removed the text's leading white space, and a token may consist of line
    breaks of both texts.

    Args:
        ids: the tokens of the preceding text and the text together.
        before: the tokens of the preceding text, tokenised alone.
    """

    def decoded(some: Sequence[int]) -> str:
        return str(tokenizer.decode(list(some), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    blank = text[: len(text) - len(text.lstrip())]
    most = len(before) + 4 * (len(blank) + 1)  # a character has at most four tokens
    # A cut within a character may undo the line breaks before it (`Places._is_whole`).
    begins = (decoded(ids[:end]) for end in range(most, most + 4))
    begin = next((text for text in begins if not text.endswith("\ufffd")), decoded(ids[:most]))
    letters = [place for place, one in enumerate(begin) if not one.isspace()]
    # The text's first letter comes after the letters of the preceding text.
    number = sum(not one.isspace() for one in decoded(before))
    stop = letters[number] if number < len(letters) else len(begin)
    return 1 + blank.count("\n") - begin[:stop].count("\n")


def plain_end(tokenizer: PreTrainedTokenizerBase, frame: str) -> str:
    """Return the text after the last added token in a chat frame; the whole frame if it has no added token."""
    tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if str(token).strip()]
    return frame[max((frame.rfind(token) + len(token) for token in tokens if token in frame), default=0) :]


def _behind(
    tokenizer: PreTrainedTokenizerBase, border: Border | None, *parts: str, special_tokens: bool
) -> EncodedText:
    if border is None:
        return encode_text(tokenizer, *parts, special_tokens=special_tokens)
    return encode_after(tokenizer, border.lead, border.held, *parts, special_tokens=special_tokens)


def common_prefix(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix of two lists of token ids."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def _characters(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int], *, special_tokens: bool) -> int | None:
    """Return the length of the longest beginning of a text that has exactly these token ids; None if there is none."""
    for end in range(len(text), -1, -1):
        found = encode_text(tokenizer, text[:end], special_tokens=special_tokens).ids
        if found == ids:
            return end
        if len(found) + 4 < len(ids):
            return None
    return None
