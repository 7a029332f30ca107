"""Tokenise a document inside the model's chat template; find the template's text between two turns."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

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
from sparsekv.formats.documents.plain_text import EncodedText, Trusted, added_ends, encode_text
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import Border, ChatFrame
from sparsekv.formats.models.find import first_line

_DOCUMENT, _QUESTION = "<<sparsekv document>>", "<<sparsekv question>>"


@dataclass(frozen=True)
class FixedPrompt:
    """input_ids [N] of everything before the question, the document's sha256, and the chat frame if there is one.

    `special_tokens`: special tokens in the document kept their meaning. `plain`: those that were read as plain text,
    with their counts. `cut`: how many tokens of the document are in the prompt, where it goes on; None: all. `border`:
    where the ids end in the text; None: what follows is tokenised as a text of its own.
    """

    input_ids: torch.Tensor
    text_sha256: str
    chat: ChatFrame | None
    special_tokens: bool = False
    plain: dict[str, int] = field(default_factory=dict)
    cut: int | None = None
    border: Border | None = None


def chat_frame(tokenizer: PreTrainedTokenizerBase, before: str | None = None) -> ChatFrame | None:
    """The chat template's text before the document, between document and question, and after; None without a template.

    Args:
        before: the text before the document, if not the template's: one with the date in it gives another every day.

    Raises:
        UsageError: the template fails, or its output does not contain the user's text exactly once.
    """
    if not tokenizer.chat_template:
        return None
    content, space = f"{_DOCUMENT}{BETWEEN}{_QUESTION}", " \n"
    parts = render(tokenizer, [{"role": "user", "content": content}]).split(content)
    if len(parts) != 2:
        raise UsageError("the model's chat template does not carry the user's text through once; build with --raw")
    padded = render(tokenizer, [{"role": "user", "content": f"{space}{content}{space}"}])
    head = parts[0] if before is None else before
    return ChatFrame(before=head, between=BETWEEN, after=parts[1], trimmed=padded == content.join(parts))


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, answered: bool = False) -> str:
    """Messages in a model's chat template, up to where its answer begins unless the last one is an answer.

    Raises:
        UsageError: the template fails.
    """
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not answered))
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
    head = Trusted("" if chat is None else chat.before)
    framed = len(encode_text(tokenizer, head).ids)
    document = Document.of(text) if isinstance(text, str) else text
    encode = _encoder(tokenizer, head, chat, special_tokens=special_tokens)
    if max_tokens is None:
        encoded, cut = encode(document.whole()), False
    else:
        encoded, cut = _first(encode, document, framed + max_tokens)
    plain, ids = encoded.plain, encoded.ids
    if cut:
        kept = str(tokenizer.decode(ids[framed:], clean_up_tokenization_spaces=False))
        plain = {token: kept.count(token) for token in plain if token in kept}
        border = border_behind(tokenizer, ids[framed:])
    else:
        end = plain_end(tokenizer, head) + _shown(document.whole(), chat)
        ids, border = find_border(tokenizer, ids, end, questions_after(chat), special_tokens=special_tokens)
    held = len(ids) - framed if cut else None
    return FixedPrompt(torch.tensor(ids), document.sha256(), chat, special_tokens, plain, held, border)


def _encoder(
    tokenizer: PreTrainedTokenizerBase, head: str, chat: ChatFrame | None, *, special_tokens: bool
) -> Callable[[str], EncodedText]:
    """Encodes a document's beginning behind the frame's head, without what the tokenizer puts at a text's end: a
    question follows."""
    ending = [] if chat is not None else added_ends(tokenizer)[1]

    def encode(part: str) -> EncodedText:
        parts = [head, _shown(part, chat)]
        found = encode_text(tokenizer, *parts, add_special_tokens=chat is None, special_tokens=special_tokens)
        ended = ending and found.ids[-len(ending) :] == ending
        return replace(found, ids=found.ids[: -len(ending)]) if ended else found

    return encode


def departure(tokenizer: PreTrainedTokenizerBase, prompt: FixedPrompt, text: str) -> str:
    """Where the token ids of a prompt and a question differ from those of the chat template's own conversation; empty
    if they are the same, and where a text was cut or has no template.

    Args:
        text: the whole document.
    """
    if prompt.chat is None or prompt.cut or prompt.plain:
        return ""
    frame, question = prompt.chat, SAMPLES[0]
    shown = f"{_shown(text, frame)}{BETWEEN}{question}"
    now = chat_frame(tokenizer)  # its head may have another date in it than the prompt's
    if now is None or render(tokenizer, [{"role": "user", "content": f"{text}{BETWEEN}{question}"}]) != (
        f"{now.before}{shown}{frame.after}"
    ):
        return "the model's chat template would change the text, which is indexed as it is"
    parts = [Trusted(frame.before), shown, Trusted(frame.after)]
    whole = encode_text(tokenizer, *parts, special_tokens=prompt.special_tokens).ids
    ours = prompt.input_ids.tolist() + encode_question(tokenizer, prompt.border, frame, question)
    # Unigram pieces of the same sum of scores may stand in another order: rounding decides which.
    if sorted(whole) == sorted(ours):
        return ""
    return "the tokens where the text ends and a question begins are not those of the model's chat template"


def _shown(text: str, chat: ChatFrame | None) -> str:
    """The text as the beginning of a message."""
    return text.lstrip() if chat is not None and chat.trimmed else text


def _first(encode: Callable[[str], EncodedText], document: Document, tokens: int) -> tuple[EncodedText, bool]:
    """The first tokens of a prompt, and whether the document goes on.

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


_ANSWER = "<<sparsekv answer>>"
_TURNS = [("user", _DOCUMENT), ("assistant", _ANSWER), ("user", _QUESTION)]


def next_turn(tokenizer: PreTrainedTokenizerBase, chat: ChatFrame) -> ChatFrame | None:
    """The frame of a question that follows an answer, from the end of the answer's text on: the token that ends an
    answer is the template's. None if the template fails, or drops the answer or the question from its output.

    Args:
        chat: the frame of the question that was answered.
    """
    _, answered, rest = _rendered(tokenizer, 3).partition(_ANSWER)
    between, asked, after = rest.partition(_QUESTION)
    if not answered or not asked:
        return None
    return chat.model_copy(update={"between": between, "after": after})


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The added token that the chat template puts behind an answer; None if it puts none there, or text before it."""
    _, _, rest = _rendered(tokenizer, 2).partition(_ANSWER)
    rest = rest.lstrip()
    found = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
    return next((found[token] for token in sorted(found, key=len, reverse=True) if rest.startswith(token)), None)


def _rendered(tokenizer: PreTrainedTokenizerBase, turns: int) -> str:
    """The first turns of a conversation in the chat template; empty without one, and where it fails."""
    messages = [{"role": role, "content": content} for role, content in _TURNS[:turns]]
    try:
        return render(tokenizer, messages, answered=turns == 2) if tokenizer.chat_template else ""
    except UsageError:  # some templates allow only one turn
        return ""
