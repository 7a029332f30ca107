"""Tokenise a document inside the model's chat template, and find the template's text between two turns."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from sparsekv.formats.documents.continuation import (
    BETWEEN,
    SAMPLES,
    border_behind,
    encode_question,
    find_border,
    line_of_first_token,
    plain_end,
    questions_after,
)
from sparsekv.formats.documents.document import Document
from sparsekv.formats.documents.files import SourceTexts
from sparsekv.formats.documents.plain_text import EncodedText, Trusted, added_ends, encode_text, untrimmed
from sparsekv.formats.errors import UsageError, first_line
from sparsekv.formats.index.schema import Border, ChatFrame, SourceFile

_DOCUMENT, _QUESTION = "<<sparsekv document>>", "<<sparsekv question>>"
_LEADING = 4096
"""Number of characters of a document that are read first to find its first letter."""


@dataclass(frozen=True)
class FixedPrompt:
    """The prompt before the question: its token ids, the document's checksum and the chat template's texts.

    Attributes:
        input_ids: [N] int64, ids of all tokens before the question.
        chat: the chat template's texts around document and question; None without a template.
        special_tokens: whether special tokens in the document kept their meaning.
        plain: special tokens of the document that were read as plain text, with their counts.
        cut: number of the document's tokens in the prompt, if the document was cut; None: the prompt has all of them.
        border: the end of the document's text, on which the question's first tokens depend. None: the question is
            tokenised separately.
        files: the table of a document of several files, with each file's tokens; None: the document is one text.
        files_behind: paths of the files of a cut document that have no token in the prompt.
        template: number of the chat template's tokens before the document.
        pages: first token of each page of a document of one text; empty for a text without pages.
        first_line: line of a document of one text at which the prompt's first token begins. Line breaks of the template
            before the text count back from line 1, to 0 or less. None: unknown.
    """

    input_ids: torch.Tensor
    text_sha256: str
    chat: ChatFrame | None
    special_tokens: bool = False
    plain: dict[str, int] = field(default_factory=dict)
    cut: int | None = None
    border: Border | None = None
    files: tuple[SourceFile, ...] | None = None
    files_behind: tuple[str, ...] = ()
    template: int = 0
    pages: tuple[int, ...] = ()
    first_line: int | None = None


def chat_frame(tokenizer: PreTrainedTokenizerBase, before: str | None = None) -> ChatFrame | None:
    """Return the texts around document and question: the chat template's before and after, and a blank line between.

    Returns None for a tokenizer without a chat template.

    Args:
        before: text to put before the document instead of the template's. A template with a date would otherwise give
            another text every day.

    Raises:
        UsageError: the template fails, or its output does not contain the user's text exactly once.
    """
    if not tokenizer.chat_template:
        return None
    content, space = f"{_DOCUMENT}{BETWEEN}{_QUESTION}", " \n"
    parts = render(tokenizer, [{"role": "user", "content": content}]).split(content)
    if len(parts) != 2:
        raise UsageError(
            "the output of the model's chat template does not contain the user's text unchanged and once; "
            "build with --raw"
        )
    padded = render(tokenizer, [{"role": "user", "content": f"{space}{content}{space}"}])
    head = parts[0] if before is None else before
    return ChatFrame(before=head, between=BETWEEN, after=parts[1], trimmed=padded == content.join(parts))


def begins_with_system(tokenizer: PreTrainedTokenizerBase, chat: ChatFrame, system: str) -> bool:
    """Whether a system message is already part of the text that is stored before an index's document.

    The chat template renders the text before the document with the system message. The result is True if this text
    contains the message, and equals the stored text or the text that the template renders without a system message. The
    stored text may contain the date of its build, and therefore need not equal the text without a system message.

    Args:
        chat: the index's chat frame; `chat.before` is the stored text, rendered without a system message.
    """
    system_turn, document = {"role": "system", "content": system}, {"role": "user", "content": _DOCUMENT}
    try:
        plain = render(tokenizer, [document]).partition(_DOCUMENT)[0]
        before = render(tokenizer, [system_turn, document]).partition(_DOCUMENT)[0]
    except UsageError:  # some templates refuse system messages
        return False
    return system.strip() in before and before in (chat.before, plain)


def may_reason(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template lets the model reason before it answers, unless `enable_thinking` is false."""
    question = [{"role": "user", "content": _QUESTION}]
    try:
        return render(tokenizer, question) != render(tokenizer, question, enable_thinking=False)
    except UsageError:
        return False


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, answered: bool = False, **variables: Any
) -> str:
    """Render messages with a model's chat template.

    Args:
        answered: the last message is an answer. Otherwise the text ends where the model's answer would begin.
        variables: further variables of the template.

    Raises:
        UsageError: the template fails.
    """
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not answered, **variables)
        )
    except Exception as error:  # a template is a program and may raise anything
        raise UsageError(f"the model's chat template fails: {first_line(error)}; build with --raw") from None


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    text: str | Document | SourceTexts,
    *,
    raw: bool = False,
    before: str | None = None,
    max_tokens: int | None = None,
    special_tokens: bool = False,
) -> FixedPrompt:
    """Tokenise the fixed prompt: the chat template's text before the document, then the document's tokens.

    Args:
        text: the document. If a `Document` is cut, it keeps in memory only as much text as the prompt's tokens need.
            `SourceTexts` are joined.
        raw: tokenise the document without the chat template.
        before: see `chat_frame`.
        max_tokens: number of tokens after which the document is cut; None: it is not cut.
        special_tokens: special tokens in the document keep their meaning; otherwise they are plain text.

    Raises:
        UsageError: the model's chat template cannot be used, or the document is not text. Or the document has several
            files or has pages, and the tokenizer does not report where tokens begin.
        SparsekvError: the document cannot be read, or its special tokens cannot be read as plain text.
    """
    chat = None if raw else chat_frame(tokenizer, before)
    head = Trusted("" if chat is None else chat.before)
    before_text = encode_text(tokenizer, head).ids
    framed = len(before_text)
    sources = text if isinstance(text, SourceTexts) else None
    document = text if isinstance(text, Document) else Document.of(text if isinstance(text, str) else text.text)
    placed = sources is not None or bool(document.pages)
    encode = _encoder(tokenizer, head, chat, special_tokens=special_tokens, starts=placed)
    if max_tokens is None:
        encoded, cut, next_start = encode(document.whole()), False, None
    else:
        encoded, cut, next_start = _first(encode, document, framed + max_tokens)
    plain, ids = encoded.plain, encoded.ids
    if cut:
        kept = str(tokenizer.decode(ids[framed:], clean_up_tokenization_spaces=False))
        plain = {token: kept.count(token) for token in plain if token in kept}
        border = border_behind(tokenizer, ids[framed:])
    else:
        end = plain_end(tokenizer, head) + _shown(document.whole(), chat)
        ids, border = find_border(tokenizer, ids, end, questions_after(chat), special_tokens=special_tokens)
    line = None
    if sources is None:
        first = before_text if chat is not None else added_ends(tokenizer)[0]
        line = line_of_first_token(tokenizer, ids, first, _to_first_letter(document))
    held = len(ids) - framed if cut else None
    files: tuple[SourceFile, ...] | None = None
    behind: tuple[str, ...] = ()
    stops_at = None if next_start is None else next_start - len(head)
    # The bytes of a character may be several tokens that begin at the same place.
    begins = list(accumulate((start - len(head) for start in encoded.starts), max))
    pages = _first_tokens(document.pages, begins, stops_at, range(framed, len(ids)))
    if sources is not None:
        files = _table(sources, begins, len(ids), stops_at)
        behind = tuple(file.path for file in sources.files[len(files) :])
    return FixedPrompt(
        input_ids=torch.tensor(ids),
        text_sha256=document.sha256(),
        chat=chat,
        special_tokens=special_tokens,
        plain=plain,
        cut=held,
        border=border,
        files=files,
        files_behind=behind,
        template=framed,
        pages=pages,
        first_line=line,
    )


def _to_first_letter(document: Document) -> str:
    """Return a beginning of a document that has all its leading white space, and more."""
    characters = _LEADING
    while not (text := document.first(characters)).strip() and len(text) == characters:
        characters *= 2
    return text


def _table(sources: SourceTexts, begins: list[int], tokens: int, stops_at: int | None) -> tuple[SourceFile, ...]:
    """Make the table of a document's files. A token belongs to the file in whose text the token begins.

    Args:
        begins: for each token, the index of its first character in the document's text.
        tokens: number of tokens in the prompt; the last of the tokens in `begins` may be missing in the prompt.
        stops_at: index of the first character that a cut removed; None: the document is not cut.
    """
    table = []
    for file, start, stop in sources.places:
        first, end = bisect_left(begins, start), bisect_left(begins, stop)
        # A token of the header may also have the first characters of the text.
        if first == len(begins):
            break
        line = file.first_line + file.text[: begins[first] - start].count("\n")
        first, end = min(first, tokens), min(end, tokens)
        about = SourceFile(
            path=file.path,
            sha256=file.sha256,
            start=first,
            stop=end,
            first_line=line,
            cut=stops_at is not None and stops_at < stop,
            pages=_first_tokens([start + page for page in file.pages], begins, stops_at, range(first, end)),
        )
        table.append(about)
    return tuple(table)


def _first_tokens(pages: Sequence[int], begins: list[int], stops_at: int | None, within: range) -> tuple[int, ...]:
    """Return the token of the first character of each page. Pages after the last token of the prompt are left out.

    Args:
        pages: index of each page's first character in the document's text.
        begins: for each token, the index of its first character in the document's text.
        stops_at: index of the first character that a cut removed; None: the document is not cut.
        within: tokens of the pages' text. If the text's first characters belong to the token before `within`, the first
            page gets the first token of `within`.
    """
    kept = [page for page in pages if stops_at is None or page < stops_at]
    tokens = (max(_token_of(page, begins), within.start) for page in kept)
    return tuple(token for token in tokens if token < within.stop)


def _token_of(character: int, begins: list[int]) -> int:
    """Return the first token of a character, whose bytes may be several tokens; -1 if all tokens begin after it."""
    last = bisect_right(begins, character) - 1
    return bisect_left(begins, begins[last]) if last >= 0 else last


def _encoder(
    tokenizer: PreTrainedTokenizerBase, head: str, chat: ChatFrame | None, *, special_tokens: bool, starts: bool
) -> Callable[[str], EncodedText]:
    """Return a function that tokenises the beginning of a document after `head`, the chat template's text before it.

    Tokens that the tokenizer adds at the end of a text are removed, because a question follows the document. The
    options `special_tokens` and `starts` are those of `encode_text`.
    """
    ending = [] if chat is not None else added_ends(tokenizer)[1]
    exact = untrimmed(tokenizer) if starts else tokenizer

    def encode(part: str) -> EncodedText:
        parts = [head, _shown(part, chat)]
        found = encode_text(
            exact, *parts, add_special_tokens=chat is None, special_tokens=special_tokens, starts=starts
        )
        ended = ending and found.ids[-len(ending) :] == ending
        return found.first(len(found.ids) - len(ending)) if ended else found

    return encode


def departure(tokenizer: PreTrainedTokenizerBase, prompt: FixedPrompt, text: str) -> str:
    """Return why a prompt and a question have other tokens than the same conversation in the chat template.

    Returns an empty text if both have the same token ids. Also returns an empty text, without a comparison, for a
    prompt without a chat template, a cut document, or special tokens that were read as plain text.

    Args:
        text: the whole document.
    """
    if prompt.chat is None or prompt.cut or prompt.plain:
        return ""
    frame, question = prompt.chat, SAMPLES[0]
    shown = f"{_shown(text, frame)}{BETWEEN}{question}"
    now = chat_frame(tokenizer)  # `before` may have another date than the prompt's frame
    if now is None or render(tokenizer, [{"role": "user", "content": f"{text}{BETWEEN}{question}"}]) != (
        f"{now.before}{shown}{frame.after}"
    ):
        return "the model's chat template would change the text, which is indexed as it is"
    parts = [Trusted(frame.before), shown, Trusted(frame.after)]
    whole = encode_text(tokenizer, *parts, special_tokens=prompt.special_tokens).ids
    ours = prompt.input_ids.tolist() + encode_question(tokenizer, prompt.border, frame, question)
    # The order of tokens is ignored: a Unigram tokenizer scores two orders of the same pieces equally, and rounding
    # decides which of them it returns.
    if sorted(whole) == sorted(ours):
        return ""
    return "the tokens where the text ends and a question begins are not those of the model's chat template"


def _shown(text: str, chat: ChatFrame | None) -> str:
    """Return the text as the chat template renders it at the start of a message.

    Some templates strip leading white space.
    """
    return text.lstrip() if chat is not None and chat.trimmed else text


def _first(
    encode: Callable[[str], EncodedText], document: Document, tokens: int
) -> tuple[EncodedText, bool, int | None]:
    """Tokenise as much of a document as the first `tokens` tokens of the prompt need.

    The tokenised beginning of the document may end inside a token. Therefore its tokens are accepted only if twice as
    much text begins with the same tokens.

    Returns:
        The first tokens of the prompt; whether the document has more tokens; and the index of the first character of
        the next token, which is None if there is no next token or the encoder returns no `starts`.
    """
    shorter: list[int] = []
    characters = 8 * tokens + 4096
    while True:
        text = document.first(characters)
        encoded = encode(text)
        ids = encoded.ids[:tokens]
        if len(text) < characters:
            return encoded.first(tokens), len(encoded.ids) > tokens, next(iter(encoded.starts[tokens:]), None)
        if len(ids) == tokens and ids == shorter:
            return encoded.first(tokens), True, next(iter(encoded.starts[tokens:]), None)
        shorter, characters = ids, 2 * characters


_ANSWER = "<<sparsekv answer>>"
_TURNS = [("user", _DOCUMENT), ("assistant", _ANSWER), ("user", _QUESTION)]


def next_turn(tokenizer: PreTrainedTokenizerBase, chat: ChatFrame) -> ChatFrame | None:
    """Return the chat template's texts around a question that follows an answer.

    The text before the question begins where the answer ends, so it includes the template's end-of-turn token. Returns
    None if the template fails, or if its output lacks the answer or the question.

    Args:
        chat: the template's texts around the question that was answered.
    """
    _, answered, rest = _rendered(tokenizer, 3).partition(_ANSWER)
    between, asked, after = rest.partition(_QUESTION)
    if not answered or not asked:
        return None
    return chat.model_copy(update={"between": between, "after": after})


def before_answer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template's text between a question and its answer, as it stands in an earlier turn.

    The text may differ from the one after which the model begins an answer: some templates put a space before an
    earlier answer, or leave out the beginning of a reasoning. Returns an empty text if there is no chat template, or if
    it fails.
    """
    return _rendered(tokenizer, 3).partition(_DOCUMENT)[2].partition(_ANSWER)[0]


def lost_of_answer(tokenizer: PreTrainedTokenizerBase, answer: str) -> str:
    """Return a warning if the chat template does not show a whole answer before the next question; otherwise empty."""
    turns = zip(("user", "assistant", "user"), (_DOCUMENT, answer, _QUESTION), strict=True)
    try:
        shown = render(tokenizer, [{"role": role, "content": content} for role, content in turns])
    except UsageError:
        shown = ""
    if _QUESTION not in shown:
        return "the model's chat template allows one question, so later ones follow without the template's text"
    if answer.strip() not in shown:
        return "the model's chat template leaves out parts of earlier answers, such as reasoning; here they stay whole"
    return ""


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token with which the chat template ends an answer, such as `<|im_end|>`.

    It must be an added token of the tokenizer, and must come first in the template's text after an answer, except for
    white space. Otherwise returns None.
    """
    _, _, rest = _rendered(tokenizer, 2).partition(_ANSWER)
    rest = rest.lstrip()
    found = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
    return next((found[token] for token in sorted(found, key=len, reverse=True) if rest.startswith(token)), None)


def _rendered(tokenizer: PreTrainedTokenizerBase, turns: int) -> str:
    """Render the first turns of a sample conversation; empty if there is no chat template, or if it fails."""
    messages = [{"role": role, "content": content} for role, content in _TURNS[:turns]]
    try:
        return render(tokenizer, messages, answered=turns == 2) if tokenizer.chat_template else ""
    except UsageError:  # some templates allow only one turn
        return ""
