"""Token ids of the messages of a conversation about a stored document."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsekv.formats.documents.continuation import border_behind, plain_end
from sparsekv.formats.documents.plain_text import Trusted, encode_after, encode_text
from sparsekv.formats.documents.prompt import begins_with_system, next_turn
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import ChatFrame
from sparsekv.runtime.decoding.answer import framed_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Place


@dataclass(frozen=True)
class Message:
    """One message of a conversation; `role` is `user`, `assistant` or `system`."""

    role: str
    content: str


def conversation_tokens(index: OpenIndex, messages: Sequence[Message]) -> torch.Tensor:
    """Return the token ids [Q] that follow the document in a conversation whose last message is a user's.

    The ids equal those of the command `chat` over the same index, unless the tokenizer splits the text of an answer
    into other tokens than the model generated. Control tokens in messages are encoded as plain text.

    Raises:
        UsageError: the messages do not alternate between user and assistant, beginning and ending with the user; a
            user's message is empty; a system message is not the first message, or is not the one that is stored before
            the document; or there are several questions, and the chat template allows only one. Also raises the errors
            of `question_ids`.
    """
    place = Place.behind(index.artifact.manifest.prompt)
    if messages and messages[0].role == "system":
        _check_system(index, place.chat, messages[0].content)
        messages = messages[1:]
    _check_roles(messages)
    parts = list[torch.Tensor]()
    for number, message in enumerate(messages):
        if message.role == "user":
            parts.append(framed_ids(index, message.content, place.chat, place.border))
        else:
            parts.append(_answer_ids(index, place, parts[-1], message.content))
            place = _next_place(index, place, parts[-1], number)
    return torch.cat(parts)


def _check_system(index: OpenIndex, chat: ChatFrame | None, text: str) -> None:
    """Raise UsageError for a system message that is not the one before the stored document."""
    if chat is None or not begins_with_system(index.tokenizer, chat, text):
        raise UsageError(
            "the document is stored without this system message, which cannot be put before it now; put its text into "
            "the question, or index a document that begins with it"
        )


def _check_roles(messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages):
        role = "assistant" if number % 2 else "user"
        if message.role == "system":
            raise UsageError("a system message follows another message; put its text into the question")
        if message.role != role:
            place = "next" if number else "first"
            raise UsageError(f"message {number + 1} is the {message.role}'s; the {place} must be the {role}'s")
        if role == "user" and not message.content.strip():
            raise UsageError(f"message {number + 1} is empty; ask something")
    if len(messages) % 2 == 0:
        raise UsageError("the last message must be the user's; ask something")


def _answer_ids(index: OpenIndex, place: Place, question: torch.Tensor, text: str) -> torch.Tensor:
    """Encode the text of an answer as it follows the tokens [Q] of its question.

    The text is encoded behind the chat frame's tokens, because such a token may take the white space behind it, and
    some tokenizers begin the text behind such a token with a space. If the text changes the frame's tokens, it is
    encoded behind the frame's last plain text.
    """
    tokenizer = index.tokenizer
    if place.chat is None:
        lead = border_behind(tokenizer, question.tolist()).lead
    else:
        lead, frame = plain_end(tokenizer, place.chat.after), Trusted(place.chat.after)
        stem, whole = encode_text(tokenizer, frame).ids, encode_text(tokenizer, frame, text).ids
        if lead != frame and whole[: len(stem)] == stem:
            return torch.tensor(whole[len(stem) :], dtype=torch.int64)
    return torch.tensor(encode_after(tokenizer, lead, text).ids, dtype=torch.int64)


def _next_place(index: OpenIndex, place: Place, answer: torch.Tensor, number: int) -> Place:
    """Return the `Place` of the question that follows an answer [A]; `number` is the answer's index in the messages.

    Raises UsageError if the chat template has only one turn.
    """
    border = border_behind(index.tokenizer, answer.tolist())
    if place.chat is None:
        return Place(None, border)
    if (chat := next_turn(index.tokenizer, place.chat)) is None:
        raise UsageError(
            f"this model's chat template allows one question, and message {number + 2} is a second question; send "
            "only the last question"
        )
    return Place(chat, border)
