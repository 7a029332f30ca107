"""Tokenise a document inside the model's chat template, and find the template's text between two turns."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from transformers import PreTrainedTokenizerBase

from sparsekv.formats.documents.continuation import (
    BETWEEN,
    SAMPLES,
    border_behind,
    encode_question,
    find_border,
    plain_end,
    questions_after,
)
from sparsekv.formats.documents.document import Document
from sparsekv.formats.documents.files import SourceTexts
from sparsekv.formats.documents.plain_text import EncodedText, Trusted, added_ends, encode_text, untrimmed
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import Border, ChatFrame, SourceFile
from sparsekv.formats.models.converted import first_line

_DOCUMENT, _QUESTION = "<<sparsekv document>>", "<<sparsekv question>>"


@dataclass(frozen=True)
class FixedPrompt:
    """The prompt before the question: its token ids, the document's checksum and the chat template's texts.

    Attributes:
        input_ids: [N] int64, ids of all tokens before the question.
        chat: the chat template's texts around document and question; None without a template.
        special_tokens: whether special tokens in the document kept their meaning.
        plain: special tokens of the document that were read as plain text, with their counts.
        cut: number of the document's tokens in the prompt, if the document was cut; None: the prompt has all of them.
        border: where in the document's text the token ids end. None: the question is tokenised separately.
        files: the files of a document of several files, by their tokens; None: the document is one text.
        files_behind: paths of the files that begin behind the last token.
        template: number of tokens before the document, which are those of the chat template.
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


def chat_frame(tokenizer: PreTrainedTokenizerBase, before: str | None = None) -> ChatFrame | None:
    """Return the chat template's texts before the document, between document and question, and after the question.

    Returns None for a tokenizer without a chat template.

    Args:
        before: text before the document that replaces the template's. A template that contains the date would
            otherwise give another text every day.

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
    """Whether the chat template puts before a document, with a system message, the text that is already there.

    The text that the template puts there today without one counts, too: only a date may differ from the frame's.
    """
    system_turn, document = {"role": "system", "content": system}, {"role": "user", "content": _DOCUMENT}
    try:
        plain = render(tokenizer, [document]).partition(_DOCUMENT)[0]
        before = render(tokenizer, [system_turn, document]).partition(_DOCUMENT)[0]
    except UsageError:  # some templates refuse system messages
        return False
    return system.strip() in before and before in (chat.before, plain)


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, answered: bool = False) -> str:
    """Render messages with a model's chat template.

    Args:
        answered: the last message is an answer. Otherwise the text ends where the model's answer would begin.

    Raises:
        UsageError: the template fails.
    """
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not answered))
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
    """Tokenise the fixed prompt: the chat template's text before the document, then `max_tokens` document tokens.

    Args:
        text: the document. A `Document` keeps only the text of these tokens in memory. `SourceTexts` are joined.
        raw: tokenise the document without the chat template.
        before: see `chat_frame`.
        max_tokens: number of tokens after which the document is cut; None: it is not cut.
        special_tokens: special tokens in the document keep their meaning; otherwise they are plain text.

    Raises:
        UsageError: the model's chat template cannot be used.
        SparsekvError: the document is not text, or its special tokens cannot be read as plain text.
    """
    chat = None if raw else chat_frame(tokenizer, before)
    head = Trusted("" if chat is None else chat.before)
    framed = len(encode_text(tokenizer, head).ids)
    sources = text if isinstance(text, SourceTexts) else None
    document = text if isinstance(text, Document) else Document.of(text if isinstance(text, str) else text.text)
    encode = _encoder(tokenizer, head, chat, special_tokens=special_tokens, starts=sources is not None)
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
    held = len(ids) - framed if cut else None
    files: tuple[SourceFile, ...] | None = None
    behind: tuple[str, ...] = ()
    if sources is not None:
        stops_at = None if next_start is None else next_start - len(head)
        files = _table(sources, [start - len(head) for start in encoded.starts], len(ids), stops_at)
        behind = tuple(file.path for file in sources.files[len(files) :])
    return FixedPrompt(
        torch.tensor(ids), document.sha256(), chat, special_tokens, plain, held, border, files, behind, framed
    )


def _table(sources: SourceTexts, starts: list[int], tokens: int, stops_at: int | None) -> tuple[SourceFile, ...]:
    """Make the table of a document's files. A file has the tokens that begin in its text.

    Args:
        starts: the character of the document at which each token begins.
        tokens: number of tokens in the prompt, which may lack the last ones.
        stops_at: the character at which the first token behind a cut begins; None: the document is not cut.
    """
    # The bytes of a character may be several tokens that begin at the same place.
    begins, table = list(accumulate(starts, max)), []
    for file, start, stop in sources.places:
        first, end = bisect_left(begins, start), bisect_left(begins, stop)
        # A token of the header may also have the first characters of the text.
        if first == len(begins):
            break
        line = file.first_line + file.text[: begins[first] - start].count("\n")
        span = {"start": min(first, tokens), "stop": min(end, tokens)}
        cut = stops_at is not None and stops_at < stop
        table.append(SourceFile(path=file.path, sha256=file.sha256, first_line=line, cut=cut, **span))
    return tuple(table)


def _encoder(
    tokenizer: PreTrainedTokenizerBase, head: str, chat: ChatFrame | None, *, special_tokens: bool, starts: bool
) -> Callable[[str], EncodedText]:
    """Return a function that tokenises the beginning of a document behind the chat template's head.

    The tokens that the tokenizer adds at the end of a text are removed, because a question follows.
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
    """Describe how a prompt and a question are tokenised differently from the chat template's rendered conversation.

    Returns an empty text if both have the same token ids. They are not compared if the prompt has no template, or if
    the document was cut or has special tokens that were read as plain text.

    Args:
        text: the whole document.
    """
    if prompt.chat is None or prompt.cut or prompt.plain:
        return ""
    frame, question = prompt.chat, SAMPLES[0]
    shown = f"{_shown(text, frame)}{BETWEEN}{question}"
    now = chat_frame(tokenizer)  # its text before the document may have another date than the prompt's
    if now is None or render(tokenizer, [{"role": "user", "content": f"{text}{BETWEEN}{question}"}]) != (
        f"{now.before}{shown}{frame.after}"
    ):
        return "the model's chat template would change the text, which is indexed as it is"
    parts = [Trusted(frame.before), shown, Trusted(frame.after)]
    whole = encode_text(tokenizer, *parts, special_tokens=prompt.special_tokens).ids
    ours = prompt.input_ids.tolist() + encode_question(tokenizer, prompt.border, frame, question)
    # A Unigram tokenizer may order pieces of equal total score differently, as decided by rounding.
    if sorted(whole) == sorted(ours):
        return ""
    return "the tokens where the text ends and a question begins are not those of the model's chat template"


def _shown(text: str, chat: ChatFrame | None) -> str:
    """Return the text as the template renders it at the start of a message; some templates strip leading white
    space."""
    return text.lstrip() if chat is not None and chat.trimmed else text


def _first(
    encode: Callable[[str], EncodedText], document: Document, tokens: int
) -> tuple[EncodedText, bool, int | None]:
    """Return the first tokens of a prompt, whether the document has more, and the character at which they begin.

    The character is None if the document has no more, or if the encoder returns no characters.

    The text that is tokenised may be cut inside a token. So its tokens are accepted only if a text twice as long begins
    with the same tokens.
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

    They begin where the answer's text ends, so they include the template's token that ends an answer. Returns None if
    the template fails, or if its output lacks the answer or the question.

    Args:
        chat: the template's texts around the question that was answered.
    """
    _, answered, rest = _rendered(tokenizer, 3).partition(_ANSWER)
    between, asked, after = rest.partition(_QUESTION)
    if not answered or not asked:
        return None
    return chat.model_copy(update={"between": between, "after": after})


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the added token with which the chat template ends an answer.

    Returns None if the text that the template puts behind an answer does not begin with an added token.
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
